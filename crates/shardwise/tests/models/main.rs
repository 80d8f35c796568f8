//! Models of Hugging Face and GGUF: loading, text, generation, adapters.

mod adapters;
mod conversations;
mod file_readers;
mod generate;
mod gguf_encoders;
mod gguf_models;
mod hostile_templates;
mod hugging_face;
mod model_memory;
mod models;
mod pretrained;
mod public_models;
mod quantized_models;
mod sampling;
mod text;
