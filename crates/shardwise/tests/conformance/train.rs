//! Training of two small language models, compared step by step with a run on one device, in every kind of layout.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde_json::Value;
use shardwise::models::{LanguageModel, ModelConfig, Spread, Weights, batch_placements, build, export, import};
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer, clip_grad_norm};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

use crate::vectors;

/// What is recorded of one model.
struct Recorded {
    model: ModelConfig,
    config: Value,
    trace: Value,
    init: BTreeMap<String, Tensor>,
    last: BTreeMap<String, Tensor>,
    gradients: BTreeMap<String, Tensor>,
    tokens: Tensor,
    logits: Tensor,
}

/// Relative tolerance in f32.
const TOLERANCE: f64 = 2e-4;

/// What is added to it for numbers close to zero: f32 and f64 agree within it.
const WEIGHTS_APART: f64 = 1e-5;
const GRADIENTS_APART: f64 = 1e-6;

/// Meshes with the spread that is tried on them.
fn layouts() -> Vec<(&'static str, Spread)> {
    let spread = |weights, tensor_parallel, sequence_parallel| Spread { weights, tensor_parallel, sequence_parallel };
    let (replicated, sharded) = (Weights::Replicated, Weights::Sharded);
    vec![
        ("dp=1", spread(replicated, false, false)),
        ("dp=4", spread(replicated, false, false)),
        ("dp=4", spread(sharded, false, false)),
        ("dp=3", spread(sharded, false, false)),
        ("tp=2", spread(replicated, true, false)),
        ("tp=4", spread(replicated, true, false)),
        ("dp=2,tp=2", spread(replicated, true, false)),
        ("dp=2,tp=2", spread(sharded, true, false)),
        ("tp=2", spread(replicated, true, true)),
        ("dp=2,tp=2", spread(sharded, true, true)),
    ]
}

pub(crate) fn check() {
    let directory = vectors::directory().join("train");
    let sets = std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("cannot read {}: {e}", directory.display()));
    let mut sets: Vec<_> = sets.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    sets.sort();
    let (mut cases, mut failures) = (0, Vec::new());
    for set in sets {
        let recorded = Arc::new(Recorded::read(&set));
        for (mesh, spread) in layouts() {
            let axes: Mesh = mesh.parse().unwrap();
            let recorded = Arc::clone(&recorded);
            let plan = match spread.plan(&recorded.model, &axes) {
                Ok(plan) => plan,
                Err(error) => {
                    // The one reason not to run: heads that cannot be shared by so many ranks.
                    let (heads, key_heads) = recorded.model.heads();
                    let shared = axes.axis("tp").map_or(1, |axis| axes.shape()[axis]);
                    assert!(heads % shared != 0 || key_heads % shared != 0, "{error}");
                    continue;
                }
            };
            cases += 1;
            let run = move |world: World| recorded.follow(&world.device_mesh(axes.clone())?, &plan);
            let name = set.file_name().unwrap().to_string_lossy().to_string();
            let size = mesh.parse::<Mesh>().unwrap().size();
            if let Err(error) = ThreadWorld::new(size).unwrap().run(run) {
                failures.push(format!("{name} on {mesh}, {spread:?}: {error}"));
            }
        }
    }
    vectors::conclude("train", cases, &failures);
}

impl Recorded {
    fn read(set: &Path) -> Self {
        let json = |name: &str| -> Value {
            let text = std::fs::read_to_string(set.join(name)).unwrap_or_else(|e| panic!("{name} of {set:?}: {e}"));
            serde_json::from_str(&text).expect(name)
        };
        let tensors = |name: &str| -> HashMap<String, Tensor> {
            candle_core::safetensors::load(set.join(name), &Device::Cpu).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        let sorted = |name: &str| tensors(name).into_iter().collect::<BTreeMap<_, _>>();
        let config = json("config.json");
        let mut batches = tensors("batches.safetensors");
        let mut batch = |name: &str| batches.remove(name).expect(name);
        Recorded {
            model: serde_json::from_value(config.clone()).expect("a model that is known"),
            trace: json("trace.json"),
            init: sorted("init.safetensors"),
            last: sorted("final.safetensors"),
            gradients: sorted("grads_step0.safetensors"),
            tokens: batch("tokens"),
            logits: batch("logits_step0"),
            config,
        }
    }

    /// Trains as the recorded run did, and compares on the way.
    fn follow(&self, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<()> {
        let model = build(&self.model, plan, mesh, DType::F32)?;
        import(&*model, &self.init)?;
        let optimizer = &self.config["optimizer"];
        let number = |value: &Value| value.as_f64().expect("a number");
        let betas = (number(&optimizer["betas"][0]), number(&optimizer["betas"][1]));
        let (eps, weight_decay) = (number(&optimizer["eps"]), number(&optimizer["weight_decay"]));
        let settings = AdamW { betas, eps, weight_decay, ..AdamW::default() };
        let group = ParamGroup::new(settings).with_lr(number(&optimizer["lr"]));
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), group)?;
        let length = self.tokens.dims()[2] - 1;
        for step in 0..self.tokens.dims()[0] {
            let tokens = self.tokens.get(step)?;
            let part = |start: usize| -> Result<DTensor> {
                let part = tokens.narrow(1, start, length)?.contiguous()?;
                DTensor::distribute_tensor(&part, mesh, batch_placements(mesh), None)
            };
            let (ids, targets) = (part(0)?, part(1)?);
            if step == 0 {
                near(&model.forward(&ids)?.full_tensor()?, &self.logits, WEIGHTS_APART, "logits")?;
            }
            let loss = model.loss(&ids, &targets)?;
            let gradients = loss.backward()?;
            if step == 0 {
                self.compare_gradients(&*model, &gradients)?;
            }
            let params: Vec<_> = model.named_parameters().into_iter().map(|(_, param)| param).collect();
            let (gradients, norm) = clip_grad_norm(gradients, &params, number(&self.config["grad_clip"]), 2.0)?;
            for (what, got) in [("losses", f64::from(loss.item::<f32>()?)), ("grad_norms", norm)] {
                let expected = number(&self.trace[what][step]);
                if (got - expected).abs() > TOLERANCE * expected.abs() {
                    return Err(Error::other(format!("{what} of step {step}: {got}, expected {expected}")));
                }
            }
            optimizer.step(gradients)?;
        }
        let found = export(&*model)?;
        for (name, expected) in &self.last {
            let got = &found[name];
            // The gradient of the biases of keys is zero but for rounding, which the optimizer turns into steps.
            let width = expected.dims()[0] / 3;
            let keys = |t: &Tensor| t.narrow(0, width, width);
            match name.ends_with("c_attn.bias") {
                true => {
                    near(&keys(got)?, &keys(expected)?, 1e-3, name)?;
                    for start in [0, 2 * width] {
                        near(&got.narrow(0, start, width)?, &expected.narrow(0, start, width)?, WEIGHTS_APART, name)?;
                    }
                }
                false => near(got, expected, WEIGHTS_APART, name)?,
            }
        }
        Ok(())
    }

    /// The gradients of the first step, by the names of the weights.
    fn compare_gradients(&self, model: &dyn LanguageModel, gradients: &shardwise::Gradients) -> Result<()> {
        let params: BTreeMap<_, _> = model.named_parameters().into_iter().collect();
        for entry in model.names().0 {
            let parts = entry.paths.iter().map(|path| gradients.get(&params[path].get())?.full_tensor());
            let whole = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?;
            near(&whole, &self.gradients[&entry.name], GRADIENTS_APART, &format!("gradient of {}", entry.name))?;
        }
        Ok(())
    }
}

/// An error unless numbers differ by at most the relative tolerance and `apart`.
fn near(got: &Tensor, expected: &Tensor, apart: f64, what: &str) -> Result<()> {
    let numbers = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.flatten_all()?.to_vec1()?) };
    let (a, b) = (numbers(got)?, numbers(expected)?);
    let fits = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) <= TOLERANCE * f64::from(b.abs()) + apart;
    if got.dims() == expected.dims() && a.iter().zip(&b).all(fits) {
        return Ok(());
    }
    let worst = a.iter().zip(&b).find(|&(a, b)| !fits((a, b)));
    Err(Error::other(format!("{what}: {:?} for {:?}, with {worst:?}", got.dims(), expected.dims())))
}
