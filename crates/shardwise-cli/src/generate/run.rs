//! Generation as every rank executes it.

use std::sync::Arc;
use std::time::Instant;

use shardwise::generate::{CachedPredictor, Generation};
use shardwise::models::{LoadOptions, PretrainedModel, build, load_planned};
use shardwise::prelude::*;

use super::chat;
use super::job::{GenerateJob, on_all_ranks};
use super::output::{Figures, GeneratedText, PrintedRow, note, print_rows, stream};
use super::prompts::{EncodedPrompt, Request};
use super::source::{SourceKind, StoredForm};
use crate::ckpt::progress::byte_bar;
use crate::train::checkpoints::load_model;

/// Loads the model and generates. Collective.
pub(super) fn on_rank(world: &World, job: &GenerateJob) -> Result<()> {
    // Every process has read these by itself.
    let numbers = [job.request.fingerprint(), job.sampling.seed, job.sampling.max_tokens as u64];
    world.agree("prompts, seed and max-tokens", &numbers)?;
    let mesh = world.device_mesh(job.mesh.clone())?;
    let start = Instant::now();
    match &job.source.kind {
        SourceKind::Pretrained { path, .. } => {
            let model = load_shown(world, |options| {
                options.dtype = job.source.dtype;
                options.keep_quantized = job.source.stored == StoredForm::KeptQuantized;
                load_planned(path, &mesh, &job.plan, options).map(|(model, _)| model)
            })?;
            if world.rank() == 0 && !job.json {
                note_weights(job, &model);
            }
            answer(world, job, &model, start.elapsed().as_secs_f64())
        }
        SourceKind::Trained { config, lora, checkpoint } => {
            let model = build(config, &job.plan, &mesh, job.source.dtype)?;
            lora.as_ref().map_or(Ok(()), |lora| lora.apply(&model))?;
            load_model(world, checkpoint, &model)?;
            answer(world, job, &model, start.elapsed().as_secs_f64())
        }
    }
}

/// Generates what was asked for. Collective.
fn answer(world: &World, job: &GenerateJob, model: &PretrainedModel, load_s: f64) -> Result<()> {
    match &job.request {
        Request::Nothing => Ok(()),
        Request::Chat { system } => chat::talk(world, job, model, system.as_deref(), load_s),
        Request::Prompts(prompts) => prompts
            .chunks(job.batch_size)
            .enumerate()
            .try_for_each(|(i, rows)| batch(world, job, rows, i, load_s, model)),
    }
}

/// Says whether weights stay quantized, if the file has such ones.
fn note_weights(job: &GenerateJob, model: &PretrainedModel) {
    let params = model.named_parameters();
    let kept = params.iter().filter(|(_, param)| param.dtype() == DType::U8).count();
    match job.source.stored {
        StoredForm::Plain => {}
        StoredForm::Dequantized => note(&format!(
            "quantized weights were dequantized to {}; --quantized keeps them as they are",
            job.source.dtype.as_str()
        )),
        StoredForm::KeptQuantized => note(&format!("{kept} of {} weights stay quantized", params.len())),
    }
}

/// Loads with a progress bar on the first rank. Collective.
pub(crate) fn load_shown<M>(world: &World, load: impl FnOnce(&mut LoadOptions) -> Result<M>) -> Result<M> {
    let mut options = LoadOptions::default();
    let bar = (world.rank() == 0).then(|| byte_bar(0));
    if let Some(bar) = bar.clone() {
        options.progress = Some(Arc::new(move |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        }));
    }
    let loaded = load(&mut options);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    loaded
}

/// Generates from prompts that are computed together, and prints the texts on the first rank. Collective.
fn batch(
    world: &World,
    job: &GenerateJob,
    prompts: &[EncodedPrompt],
    number: usize,
    load_s: f64,
    model: &PretrainedModel,
) -> Result<()> {
    let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.ids.clone()).collect();
    let started = CachedPredictor::new(model).and_then(|predictor| {
        let predictor = if job.source.has_short_context() { predictor.forgetful() } else { predictor };
        Generation::new(predictor, &job.source.tokenizer, &ids, job.sampling.clone())
    });
    let mut generation = world.all_ok(started)?;
    let first = world.rank() == 0;
    // Text of several rows at once would mix.
    let streamed = first && !job.json && matches!(job.request, Request::Prompts(ref all) if all.len() == 1);
    if streamed && prompts[0].is_text {
        stream(&prompts[0].text)?;
    }
    let mut rows: Vec<GeneratedText> =
        prompts.iter().map(|_| GeneratedText { text: String::new(), tokens: Vec::new(), stop: None }).collect();
    for token in generation.by_ref() {
        let token = on_all_ranks(world, token)?;
        if streamed {
            stream(token.text())?;
        }
        let row = &mut rows[token.row];
        row.text += token.text();
        row.tokens.push(token.id);
        row.stop = token.stop;
    }
    let stats = generation.stats();
    let figures = Figures::gather(world, load_s, prompts.len(), stats)?;
    if !first {
        return Ok(());
    }
    let rows: Vec<PrintedRow<'_>> = prompts
        .iter()
        .zip(rows)
        .map(|(prompt, generated)| PrintedRow {
            prompt: &prompt.text,
            is_text: prompt.is_text,
            prompt_tokens: prompt.ids.len(),
            generated,
        })
        .collect();
    if number > 0 && !job.json {
        stream("\n")?;
    }
    print_rows(job, &rows, &figures, streamed)?;
    if !job.json {
        note(&figures.summary(stats.new_tokens));
    }
    Ok(())
}
