//! Fine-tunes a model of another library with low-rank adapters on three ranks, saves them in the form of PEFT, and adds them to
//! the weights.
//!
//! Run with `cargo run --example 16_finetune_lora`, or with a directory of your own:
//! `cargo run --release --example 16_finetune_lora -- path/to/model`.

use std::path::PathBuf;

use shardwise::data::{Batches, TokenSequences};
use shardwise::models::{self, export_hf, load_adapter, lora_targets, save_adapter};
use shardwise::nn::{Lora, Module};
use shardwise::optim::ParamGroup;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;

fn main() -> Result<()> {
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/conformance/data/models/llama_gqa");
    let base = std::env::args().nth(1).map_or_else(|| PathBuf::from(shipped), PathBuf::from);
    let out = std::env::temp_dir().join(format!("shardwise-lora-{}", std::process::id()));
    let adapter = out.join("adapter");
    let directory = out.clone();
    // Three ranks: neither 9 query heads nor 3 key heads are halved.
    launch(3, move |world| {
        let mesh = world.mesh([("tp", 3)])?;
        let model = models::load(&base, &mesh, TensorParallel::new("tp"))?;

        // Adapters next to two projections of every layer; everything else is frozen.
        let lora = Lora { rank: 4, alpha: 8.0, ..Lora::default() };
        let targets = lora_targets(&model, &["q_proj", "v_proj"])?;
        lora.apply(&model, |path| targets.contains(path))?;
        let trained: usize =
            model.trainable_parameters().iter().map(|(_, p)| p.shape().iter().product::<usize>()).sum();

        // An ordinary training loop: the optimizer holds the trainable parameters.
        let mut optimizer = ParamGroup::new(AdamW::default()).with_lr(0.02).over(&model)?;
        let text: Vec<u32> = (0..400).map(|i| (i * i % 23 + 3) as u32).collect();
        let mut batches = Batches::new(TokenSequences::new(text, 16)?, &mesh)?.shuffle(1).batch(4);
        let (mut first, mut last) = (0.0, 0.0);
        for step in 0..20 {
            let batch = batches.next_batch()?;
            let loss = model.loss(&batch[0], &batch[1])?;
            last = loss.item::<f32>()?;
            if step == 0 {
                first = last;
            }
            optimizer.step(loss.backward()?)?;
        }
        assert!(last < first, "the loss falls: {first} to {last}");

        // PEFT loads this directory next to the model.
        save_adapter(&world, &adapter, &model, &lora, &base.to_string_lossy())?;

        // Another program: the model, the adapter, one set of weights.
        let again = models::load(&base, &mesh, TensorParallel::new("tp"))?;
        let layers = load_adapter(&world, &adapter, &again)?.merge(&again)?.len();
        export_hf(&world, directory.join("merged"), &again, again.config())?;
        world.on_first_rank(|| {
            println!("{trained} of {} parameters trained, loss {first:.3} to {last:.3}", again.parameter_count());
            println!("merged the adapters of {layers} layers");
            Ok(())
        })?;
        Ok(())
    })?;
    Ok(std::fs::remove_dir_all(out)?)
}
