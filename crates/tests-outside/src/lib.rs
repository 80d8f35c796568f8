//! Tests that extend Shardwise from outside; see `tests/`.
