//! The tests of this crate extend Shardwise with public items only, as a program would.
