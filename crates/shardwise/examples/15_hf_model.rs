//! A model directory in Hugging Face's form, loaded on three ranks with tensor parallelism, generates text.
//!
//! The directory holds a tiny Llama with random weights, so the text means nothing; pass another directory, or a GGUF file, to
//! get a better one: `cargo run --release --example 15_hf_model -- path/to/model 'The capital of France is'`.
//!
//! Nine query heads and three key heads fit three ranks, and with `Ragged` placements every other number of ranks too.

use std::path::PathBuf;

use shardwise::generate::Sampling;
use shardwise::models;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/conformance/data/models/llama_gqa");
    let path = PathBuf::from(arguments.next().unwrap_or_else(|| small.to_string()));
    let prompt = arguments.next().unwrap_or_else(|| "The number of heads is".to_string());

    launch(3, move |world| {
        let mesh = world.mesh([("tp", 3)])?;
        // Each rank reads the bytes of its own shards.
        let model = models::load(&path, &mesh, TensorParallel::new("tp"))?;
        world.on_first_rank(|| {
            let config = model.config();
            let (heads, key_heads) = config.heads();
            println!("{}: {} layers, {heads} heads, {key_heads} key heads", config.model_type(), config.layers());
            for (path, param) in model.named_parameters().iter().filter(|(path, _)| path.contains("blocks.0.attention"))
            {
                println!("  {path}: {}", param.layout());
            }
            Ok(())
        })?;

        // Every rank generates the same tokens; the first one prints them as they come.
        let first = world.rank() == 0;
        let mut generation = model.generate(&prompt, Sampling::greedy().tokens(24))?;
        if first {
            print!("{prompt}");
        }
        for token in generation.by_ref() {
            let token = token?;
            if first {
                print!("{}", token.text());
            }
        }
        if first {
            let stats = generation.stats();
            println!("\n{} tokens, {:.0} per second", stats.new_tokens, stats.tokens_per_second());
        }

        // Sampling depends only on the seed, not on the mesh or on other prompts of a batch.
        let sampling = Sampling::new(0.8).top_k(40).seed(7).tokens(8);
        let texts = model.generate_batch(&[prompt.as_str(), "hello"], sampling)?.text()?;
        world.on_first_rank(|| {
            texts.iter().for_each(|text| println!("sampled: {text:?}"));
            Ok(())
        })?;
        Ok(())
    })
}
