//! Several documents in one sequence: loss and gradients are those of the documents alone.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use shardwise::data::{Dataset, LabeledTokens, PackedSequences, Packing};
use shardwise::models::{self, Model, PretrainedModel};
use shardwise::nn::Module;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name)
}

/// Documents whose tokens repeat, so that a token of another document would be of use.
fn documents(vocabulary: usize) -> Vec<LabeledTokens> {
    let ids = |first: usize, count: usize| (0..count).map(|i| ((first + i * i) % vocabulary) as u32).collect();
    [(3, 5), (7, 2), (1, 8), (3, 6)].map(|(first, count)| LabeledTokens::all(ids(first, count))).to_vec()
}

/// The loss of some sequences, and the norms of all gradients.
fn loss_and_gradients(model: &PretrainedModel, mesh: &DeviceMesh, samples: &[Vec<Tensor>]) -> Result<(f32, Vec<f32>)> {
    let parts = samples[0].len();
    let stacked = |part: usize| {
        let rows: Vec<&Tensor> = samples.iter().map(|sample| &sample[part]).collect();
        DTensor::replicate(&Tensor::stack(&rows, 0)?, mesh)
    };
    let batch = (0..parts).map(stacked).collect::<Result<Vec<_>>>()?;
    let loss = model.batch_loss(&batch)?;
    let grads = loss.backward()?;
    let mut all = Vec::new();
    for (_, param) in model.named_parameters() {
        all.extend(grads.get(&param.get())?.full_tensor()?.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok((loss.full_tensor()?.to_scalar::<f32>()?, all))
}

/// The documents one by one, weighted by their numbers of targets.
fn one_by_one(model: &PretrainedModel, mesh: &DeviceMesh, documents: &[LabeledTokens]) -> Result<(f32, Vec<f32>)> {
    let (mut loss, mut gradients, mut count) = (0.0, Vec::new(), 0.0);
    for document in documents {
        let alone =
            PackedSequences::new(std::slice::from_ref(document), document.ids.len(), 0, Packing::OnePerSequence)?;
        let (one, of_one) = loss_and_gradients(model, mesh, &[alone.sample(0)?])?;
        let targets = (document.ids.len() - 1) as f32;
        gradients.resize(of_one.len(), 0.0);
        gradients.iter_mut().zip(of_one).for_each(|(sum, gradient)| *sum += targets * gradient);
        loss += targets * one;
        count += targets;
    }
    gradients.iter_mut().for_each(|gradient| *gradient /= count);
    Ok((loss / count, gradients))
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Rotary and learned positions, sliding windows, experts.
#[test]
fn packed_documents_are_those_alone() {
    for name in ["llama_gqa", "gpt2", "mistral", "gemma2"] {
        for ranks in [1, 2] {
            launch(ranks, move |world| {
                let mesh = world.mesh([("tp", ranks)])?;
                let model = models::load(model(name), &mesh, TensorParallel::new("tp"))?;
                model.eval();
                let documents = documents(model.config().vocab_size());
                let (loss, gradients) = one_by_one(&model, &mesh, &documents)?;
                // Two sequences: one full, one with padding.
                let packed = PackedSequences::new(&documents, 15, 0, Packing::Packed)?;
                let samples = |packed: &PackedSequences| -> Result<Vec<_>> {
                    (0..packed.len()).map(|i| packed.sample(i)).collect()
                };
                let label = format!("{name} on {ranks} rank(s)");
                let apart = packed.clone().with_positions();
                assert_eq!(apart.len(), 2, "{label}");
                let (found, of_packed) = loss_and_gradients(&model, &mesh, &samples(&apart)?)?;
                let scale = gradients.iter().fold(0.0f32, |scale, gradient| scale.max(gradient.abs()));
                assert!((found - loss).abs() <= 2e-6 * loss.abs(), "{label}: {found}, not {loss}");
                let error = largest(&of_packed, &gradients);
                assert!(error <= 1e-5 * scale, "{label}: gradients differ by {error} of {scale}");
                // Without positions a token sees the documents before its own, which makes a difference.
                let (mixed, of_mixed) = loss_and_gradients(&model, &mesh, &samples(&packed)?)?;
                assert!((mixed - loss).abs() > 1e-4 * loss.abs(), "{label}: {mixed} and {loss}");
                assert!(largest(&of_mixed, &gradients) > 1e-3 * scale, "{label}");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn positions_of_another_shape_or_type_are_refused() {
    launch(1, |world| {
        let mesh = world.mesh([("tp", 1)])?;
        let model = models::load(model("llama_gqa"), &mesh, TensorParallel::new("tp"))?;
        let place = |values: Tensor| DTensor::replicate(&values, &mesh);
        let ids = place(Tensor::zeros((1, 4), DType::I64, &Device::Cpu)?)?;
        for wrong in
            [Tensor::zeros((1, 3), DType::I64, &Device::Cpu)?, Tensor::zeros((1, 4), DType::F32, &Device::Cpu)?]
        {
            let error = model.forward_documents(&ids, &place(wrong)?).unwrap_err().to_string();
            assert!(error.contains("positions in documents") && error.contains("integers [1, 4]"), "{error}");
        }
        assert!(model.loss(&ids, &ids).is_ok());
        assert!(model.batch_loss(&[ids.clone(), ids.clone(), ids.clone(), ids]).is_err());
        Ok(())
    })
    .unwrap();
}
