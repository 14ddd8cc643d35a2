"""Runs the framework on real input: a retailer's ledgers, with crashes and resends on purpose.

Nothing outside this package imports it; what it needs of the framework is what any user gets.
"""
