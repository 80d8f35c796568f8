//! Training runs of small language models recorded from PyTorch on one device, repeated in any layout on any engine:
//! losses, gradients, gradient norms and final weights must agree.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::Value;
use shardwise::models::{LanguageModel, ModelConfig, ParallelismConfig, batch_placements, build, export, import};
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer, clip_grad_norm};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

/// One recorded training run: settings, batches, and the results of every step.
pub struct Recorded {
    /// Name of the directory that the run was read from.
    pub name: String,
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

/// Absolute tolerances, for numbers close to zero: f32 and f64 runs of the recorded models agree within them.
const WEIGHTS_APART: f64 = 1e-5;
const GRADIENTS_APART: f64 = 1e-6;

/// Repeats all runs of a directory on a mesh and returns how many there are. Collective: every rank of the world calls it.
pub fn follow_all(world: &World, directory: &Path, mesh: &Mesh, parallelism: &ParallelismConfig) -> Result<usize> {
    let ranks = world.device_mesh(mesh.clone())?;
    let all = Recorded::all(directory);
    for recorded in &all {
        let failed = |error| Error::other(format!("{} on {mesh}, {parallelism:?}: {error}", recorded.name));
        recorded.follow(&ranks, &recorded.plan(mesh, parallelism)?).map_err(failed)?;
    }
    Ok(all.len())
}

impl Recorded {
    /// Reads all runs of a directory.
    ///
    /// # Panics
    /// If there is none, or one cannot be read.
    pub fn all(directory: &Path) -> Vec<Self> {
        let sets = std::fs::read_dir(directory).unwrap_or_else(|e| panic!("cannot read {}: {e}", directory.display()));
        let mut sets: Vec<_> = sets.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
        assert!(!sets.is_empty(), "no recorded runs in {}", directory.display());
        sets.sort();
        sets.iter().map(|set| Self::read(set)).collect()
    }

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
            name: set.file_name().expect("a directory has a name").to_string_lossy().to_string(),
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

    /// The numbers of query heads and of key heads.
    pub fn heads(&self) -> (usize, usize) {
        self.model.heads()
    }

    /// The plan for this model on a mesh.
    ///
    /// # Errors
    /// Those of [`ParallelismConfig::plan`]. Heads that do not divide by the size of axis `tp` are none: every model has a plan
    /// on every mesh.
    pub fn plan(&self, mesh: &Mesh, parallelism: &ParallelismConfig) -> Result<ShardingPlan> {
        let failed = |error| Error::other(format!("no plan for {} on {mesh}, {parallelism:?}: {error}", self.name));
        parallelism.plan(&self.model, mesh).map_err(failed)
    }

    /// Repeats the run with this plan and compares every step. Collective: every rank of the mesh calls it.
    pub fn follow(&self, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<()> {
        let model = build(&self.model, plan, mesh, DType::F32)?;
        import(&model, &self.init)?;
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
                self.compare_gradients(&model, &gradients)?;
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
        let found = export(&model)?;
        for (name, expected) in &self.last {
            let got = &found[name];
            // The gradient of key biases is zero up to rounding errors, which AdamW scales to full steps.
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

    /// Compares the gradients of the first step, by the names that weights have in files.
    fn compare_gradients(&self, model: &dyn LanguageModel, gradients: &shardwise::Gradients) -> Result<()> {
        let params: BTreeMap<_, _> = model.named_parameters().into_iter().collect();
        for entry in model.weight_names().0 {
            let parts = entry.paths.iter().map(|path| gradients.get(&params[path].get())?.full_tensor());
            let whole = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?;
            near(&whole, &self.gradients[&entry.name], GRADIENTS_APART, &format!("gradient of {}", entry.name))?;
        }
        Ok(())
    }
}

/// Returns an error unless all elements are within `TOLERANCE * |expected| + apart`.
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
