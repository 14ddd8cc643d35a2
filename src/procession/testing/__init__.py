"""What tests need: conformance suites for adapters. Nothing here runs in production."""
