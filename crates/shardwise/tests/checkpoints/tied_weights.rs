//! Weights that two modules share, under FSDP with tensor parallelism: saved once in every format, shared again after a load on
//! any other mesh, and trained on as on one device.

use candle_core::Tensor;
use shardwise::checkpoint::{self, Format, SaveOptions};
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ParallelismConfig, PretrainedModel, batch_placements, build,
};
use shardwise::nn::{FsdpModule, Module, ModuleItem, StateDictOptions};
use shardwise::ops::LossOptions;
use shardwise::optim::{ParamGroup, ShardedOptimizer};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

const VOCABULARY: usize = 13;
const WIDTH: usize = 12;
const SAVED_AFTER: usize = 2;
const STEPS: usize = 4;

fn configs() -> Vec<(&'static str, ModelConfig)> {
    let gpt = GptConfig {
        vocab_size: VOCABULARY,
        seq_len: 6,
        d_model: WIDTH,
        n_layers: 1,
        n_heads: 3,
        d_ff: 10,
        tied_head: true,
        ..GptConfig::default()
    };
    let llama = LlamaConfig {
        vocab_size: VOCABULARY,
        seq_len: 6,
        d_model: WIDTH,
        n_layers: 1,
        n_heads: 3,
        n_kv_heads: 1,
        d_ff: 10,
        tied_head: true,
        ..LlamaConfig::default()
    };
    vec![("gpt", ModelConfig::Gpt(gpt)), ("llama", ModelConfig::Llama(llama))]
}

/// Meshes; parameters are sharded over `dp` and over `tp`. The 13 rows of the table divide by none of the sizes.
const MESHES: [(&str, bool); 5] =
    [("dp=2,tp=2", false), ("dp=3,tp=2", true), ("tp=3", false), ("dp=4", false), ("dp=1", false)];

fn batch(mesh: &DeviceMesh, step: usize) -> Result<[DTensor; 2]> {
    let tokens = |shift: usize| {
        let token = move |i: &[usize]| ((i[0] * 5 + (i[1] + shift) * 3 + step * 4 + i[0] * i[1]) % VOCABULARY) as f64;
        DTensor::from_fn((12, 6), DType::I64, mesh, batch_placements(mesh.mesh()), token)
    };
    Ok([tokens(0)?, tokens(1)?])
}

/// A model on a mesh, with its optimizer.
struct Run {
    model: PretrainedModel,
    optimizer: ShardedOptimizer,
    mesh: DeviceMesh,
}

impl Run {
    fn new(config: &ModelConfig, mesh: &DeviceMesh, sequence_parallel: bool, seed: u64) -> Result<Self> {
        let tensor_parallel = mesh.axis("tp").is_ok();
        let data_parallel =
            if mesh.axis("dp").is_ok() { DataParallelMode::FullyShard } else { DataParallelMode::Replicate };
        let parallelism = ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel };
        mesh.manual_seed(seed);
        let model = build(config, &parallelism.plan(config, mesh.mesh())?, mesh, DType::F64)?;
        let optimizer =
            ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()).with_lr(0.01))?;
        Ok(Run { model, optimizer, mesh: mesh.clone() })
    }

    /// The loss of step `step`, in f64.
    fn step(&mut self, step: usize) -> Result<f64> {
        let [ids, targets] = batch(&self.mesh, step)?;
        let logits = self.model.forward(&ids)?.flatten(0, 1)?;
        let loss = logits.cross_entropy(&targets.flatten(0, 1)?, LossOptions::default())?;
        self.optimizer.step(loss.backward()?)?;
        loss.item::<f64>()
    }

    fn weights(&self) -> Result<Vec<(String, Vec<f64>)>> {
        let numbers = |tensor: Tensor| -> Result<Vec<f64>> { Ok(tensor.flatten_all()?.to_vec1::<f64>()?) };
        let params = self.model.named_parameters().into_iter();
        params.map(|(name, param)| Ok((name, numbers(param.get().full_tensor()?)?))).collect()
    }

    /// Fails unless exactly one weight has two paths, which see one tensor.
    fn assert_tied(&self, what: &str) {
        let mut all: Vec<(String, Param)> = Vec::new();
        self.model.walk("", &mut |path, item| {
            if let ModuleItem::Param(param) = item {
                all.push((path.to_string(), param.clone()));
            }
        });
        let table: Vec<_> = all.iter().filter(|(_, param)| param.shape() == [VOCABULARY, WIDTH]).collect();
        assert_eq!(table.len(), 2, "{what}: the table and the head");
        assert!(table[0].1.is_same(&table[1].1), "{what}");
        assert!(table[0].1.get().shares_memory(&table[1].1.get()), "{what}");
        assert_eq!(self.model.named_parameters().len() + 1, all.len(), "{what}");
        assert_eq!(self.optimizer.params().count() + 1, all.len(), "{what}");
    }
}

fn assert_close(found: &[(String, Vec<f64>)], expected: &[(String, Vec<f64>)], what: &str) {
    for ((name, a), (other, b)) in found.iter().zip(expected) {
        assert_eq!(name, other);
        let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // Adam divides gradients by their size, so rounding errors of tiny ones grow.
        assert!(a.len() == b.len() && worst < 1e-7, "{what}, {name}: {worst}");
    }
    assert_eq!(found.len(), expected.len());
}

fn on<R: Send + 'static>(mesh: &str, body: impl Fn(&World, &DeviceMesh) -> Result<R> + Send + Sync + 'static) -> R {
    let axes: Mesh = mesh.parse().unwrap();
    let run = move |world: World| body(&world, &world.device_mesh(axes.clone())?);
    let size = mesh.parse::<Mesh>().unwrap().size();
    ThreadWorld::new(size).unwrap().run(run).unwrap_or_else(|error| panic!("{mesh}: {error}")).swap_remove(0)
}

/// Losses of all steps and the last weights on one device.
fn alone(config: &ModelConfig) -> (Vec<f64>, Vec<(String, Vec<f64>)>) {
    let config = config.clone();
    on("dp=1", move |_, mesh| {
        let mut run = Run::new(&config, mesh, false, 3)?;
        run.assert_tied("one device");
        let losses = (0..STEPS).map(|step| run.step(step)).collect::<Result<_>>()?;
        Ok((losses, run.weights()?))
    })
}

#[test]
fn a_shared_weight_is_saved_once_and_shared_again_on_every_other_mesh() {
    // A file of `torch.save` has whole tensors only.
    let holds_shards = |format: &Format| format.is_writable() && *format != Format::Torch;
    let formats: Vec<Format> = Format::all().into_iter().filter(holds_shards).collect();
    assert!(formats.len() >= 3, "{formats:?}");
    for (name, config) in configs() {
        let (losses, weights) = alone(&config);
        for (at, (from, sequence)) in MESHES.into_iter().enumerate() {
            let scratch = Scratch::new(&format!("tied-{name}-{}", from.replace(['=', ','], "")));
            let saved = {
                let (config, root, formats) = (config.clone(), scratch.0.clone(), formats.clone());
                move |world: &World, mesh: &DeviceMesh| {
                    let mut run = Run::new(&config, mesh, sequence, 3)?;
                    let found = (0..SAVED_AFTER).map(|step| run.step(step)).collect::<Result<Vec<_>>>()?;
                    for format in &formats {
                        let options = SaveOptions { format: *format, ..SaveOptions::default() };
                        let path = root.join(format.name());
                        match *format == Format::HuggingFace {
                            // It holds tensors only.
                            true => checkpoint::save_from_with(world, path, (&run.model,), &options)?,
                            false => checkpoint::save_from_with(world, path, (&run.model, &run.optimizer), &options)?,
                        }
                    }
                    Ok(found)
                }
            };
            let found = on(from, saved);
            let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-8);
            assert!(close(&found, &losses), "{name} on {from}: {found:?}, not {losses:?}");
            for format in &formats {
                let path = scratch.0.join(format.name());
                let stored = checkpoint::open(&path).unwrap();
                let like_table = |key: &&String| stored.tensors[*key].shape == [VOCABULARY, WIDTH];
                let tables: Vec<&String> = stored.tensors.keys().filter(like_table).collect();
                // One weight, and two moments of it where the optimizer was saved.
                let expected = if *format == Format::HuggingFace { 1 } else { 3 };
                assert_eq!(tables.len(), expected, "{name} on {from}, {format}: {tables:?}");
                // Over all sources, every mesh is a target of every format.
                for (to, sequence) in [MESHES[(at + 1) % MESHES.len()], MESHES[(at + 3) % MESHES.len()]] {
                    let what = format!("{name} from {from} to {to}, {format}");
                    let (config, path, format) = (config.clone(), path.clone(), *format);
                    let text = what.clone();
                    let (found, last) = on(to, move |world, mesh| {
                        // Other weights and moments than the saved ones.
                        let mut run = Run::new(&config, mesh, sequence, 4)?;
                        run.step(9)?;
                        if format == Format::HuggingFace {
                            checkpoint::load_into(world, &path, (&run.model,))?;
                            run.assert_tied(&text);
                            return Ok((Vec::new(), run.weights()?));
                        }
                        checkpoint::load_into(world, &path, (&run.model, &mut run.optimizer))?;
                        run.assert_tied(&text);
                        let found = (SAVED_AFTER..STEPS).map(|step| run.step(step)).collect::<Result<Vec<_>>>()?;
                        Ok((found, run.weights()?))
                    });
                    assert!(close(&found, &losses[SAVED_AFTER..]), "{what}: {found:?}, not {losses:?}");
                    if format != Format::HuggingFace {
                        assert_close(&last, &weights, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn full_states_of_a_shared_weight_move_between_layouts_in_memory() {
    for (name, config) in configs() {
        let (losses, weights) = alone(&config);
        let (found, last) = on("dp=2,tp=2", move |world, mesh| {
            let mut run = Run::new(&config, mesh, true, 3)?;
            (0..SAVED_AFTER).try_for_each(|step| run.step(step).map(drop))?;
            let state = run.model.full_state_dict(world, 1)?;
            let moments = run.optimizer.state_dict()?.to_full_on(world, 1)?;
            for (state, moments) in state.iter().zip(&moments) {
                let tables = state.values().filter(|tensor| tensor.dims() == [VOCABULARY, WIDTH]).count();
                assert_eq!((tables, moments.params.len()), (1, run.optimizer.params().count()));
            }
            let other = world.mesh([("dp", 4)])?;
            let mut again = Run::new(&config, &other, false, 4)?;
            again.step(9)?;
            again.model.load_full_state_dict(world, 1, state.as_ref(), &StateDictOptions::default())?;
            again.optimizer.load_full_state_from(world, 1, moments.as_ref())?;
            again.assert_tied("in memory");
            let found = (SAVED_AFTER..STEPS).map(|step| again.step(step)).collect::<Result<Vec<_>>>()?;
            Ok((found, again.weights()?))
        });
        assert!(found.iter().zip(&losses[SAVED_AFTER..]).all(|(a, b)| (a - b).abs() < 1e-8), "{name}: {found:?}");
        assert_close(&last, &weights, name);
    }
}
