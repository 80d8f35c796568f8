//! Test suites that run on any communication engine, and the test data that several test targets share.
//!
//! A dev-dependency of the crates of the workspace; it is not published. Suites for an engine take a world or a group
//! and panic or return an error at the first difference: [`collectives`], [`disagreements`], [`layout_pairs`],
//! [`remote_shards`] and [`recorded_training`]. An engine in another crate passes when all of them do (see
//! `crates/shardwise-mpi/tests/processes`).
//!
//! Test data: [`values`] and [`parameters`] for tensors with known elements, [`vectors`] for the vectors recorded from
//! PyTorch, [`torch_ops`] for the table of operators that most of them name, and [`torch_calls`] for PyTorch's operators in PyTorch's
//! own call form. [`counting`] counts the collectives of a rank, and [`refusals`] runs programs that must fail at once.

pub mod collectives;
pub mod counted_memory;
pub mod counting;
pub mod disagreements;
pub mod errors;
pub mod layout_pairs;
pub mod misuse;
pub mod own_process;
pub mod parameters;
pub mod process_memory;
pub mod public_models;
pub mod recorded_graph;
pub mod recorded_training;
pub mod refusals;
pub mod remote_shards;
pub mod scratch;
pub mod settings;
pub mod torch_attributes;
pub mod torch_calls;
pub mod torch_ops;
pub mod values;
pub mod vectors;
