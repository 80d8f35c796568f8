//! Modules, plans, optimizers, fully sharded training and the trainer.

mod auto_plan;
mod clipping_layouts;
mod data;
mod data_sources;
mod families;
mod fsdp;
mod layers;
mod lora;
mod merged_dimensions;
mod merged_optimizers;
mod module_errors;
mod optim;
mod optim_matrices;
mod optim_state;
mod parallel_styles;
mod plan;
mod plan_layers;
mod plan_overrides;
mod reduce_types;
mod torch_modules;
mod trainer;
mod training;
