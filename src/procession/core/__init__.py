"""Pure decisions: no await, no clock, no random, no logging. Values in, decisions out."""
