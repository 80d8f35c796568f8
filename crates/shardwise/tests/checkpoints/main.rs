//! Checkpoints: formats, ranks, damage, crashes, memory.

mod archive_flips;
mod checkpoint;
mod checkpoint_corruption;
mod checkpoint_crash;
mod checkpoint_fuzz;
mod checkpoint_gguf;
mod checkpoint_integrity;
mod checkpoint_leftovers;
mod checkpoint_memory;
mod checkpoint_parity;
mod checkpoint_plans;
mod checkpoint_pytorch_entries;
mod checkpoint_ranks;
mod checkpoint_training_state;
mod full_disk;
mod readers_and_writers;
mod state_dict;
mod state_exchange;
mod tied_weights;
