//! The command, as a user runs it: arguments, output, files, exit codes.

mod bench;
mod ckpt;
mod ckpt_layouts;
mod data;
mod doctor;
mod fine_tuning;
mod generate;
mod gguf;
mod help;
mod hostile_files;
#[cfg(feature = "mpi")]
mod mpi;
mod plan;
mod program;
mod report_command;
mod stranger;
mod train;
mod train_resume;
mod wrong_inputs;
