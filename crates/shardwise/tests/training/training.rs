//! Training beyond the gradients of single operators: the number of collectives, memory, and layers that give the same
//! results in every layout.

use candle_core::Tensor;
use shardwise::nn::{
    Activation, AttentionConfig, BatchNorm, Builder, Conv2d, Conv2dOptions, Dropout, Embedding, EmbeddingBag, Forward,
    GroupNorm, LayerNorm, Linear, Mlp, Module, MultiHeadAttention, RmsNorm, RotaryEmbedding, SwiGlu, init::Init,
};
use shardwise::ops::{EmbeddingBagMode, LossOptions};
use shardwise::prelude::*;
use shardwise::{DryWorld, checkpoint_activations, local_map, no_grad};

/// The collectives of a rank since its trace was cleared, without agreements on seeds.
fn collectives(world: &World) -> Vec<&'static str> {
    world.trace().records().iter().map(|r| r.call).filter(|call| *call != "agree").collect()
}

fn close(a: &Tensor, b: &Tensor, tolerance: f64) -> bool {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && values(a).iter().zip(&values(b)).all(|(a, b)| (a - b).abs() <= tolerance * b.abs().max(1.0))
}

#[test]
fn data_parallel_layers_reduce_all_gradients_in_one_bucket() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let layer = Linear::new(&Builder::new(&mesh), 8, 6)?;
        let x = DTensor::randn((8, 8), &mesh, [Shard(0)])?;
        world.trace().clear();
        let gradients = layer.forward(&x)?.square()?.sum_all()?.backward()?;
        assert_eq!(collectives(&world), Vec::<&str>::new());
        let gradients = gradients.in_param_layout()?;
        // weight and bias together
        assert_eq!(collectives(&world), ["all_reduce"]);
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let on_one = |t: &DTensor| DTensor::distribute_tensor(&t.full_tensor()?, &alone, [Replicate], None);
        let (w, b) = (layer.weight.get(), layer.bias.as_ref().unwrap().get());
        let (w1, b1) = (on_one(&w)?.requires_grad(), on_one(&b)?.requires_grad());
        let expected = on_one(&x)?.linear(&w1, Some(&b1))?.square()?.sum_all()?.backward()?;
        for (ours, theirs) in [(&w, &w1), (&b, &b1)] {
            assert_eq!(gradients.get(ours)?.placements(), [Replicate]);
            assert!(close(&gradients.get(ours)?.full_tensor()?, &expected.get(theirs)?.full_tensor()?, 1e-5));
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn fully_sharded_weights_are_gathered_twice_and_their_gradient_is_reduce_scattered() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let built = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
        let layer = Linear::without_bias(&built, 8, 12)?;
        let x = DTensor::randn((32, 8), &mesh, [Shard(0)])?.requires_grad();
        world.trace().clear();
        let loss = layer.forward(&x)?.square()?.sum_all()?;
        assert_eq!(collectives(&world), ["all_gather"]);
        world.trace().clear();
        let gradients = loss.backward()?;
        // gathered once more for the gradient of the input, because only the shard is saved; no rank keeps the full
        // gradient
        assert_eq!(collectives(&world), ["all_gather", "reduce_scatter"]);
        world.trace().clear();
        let gradients = gradients.in_param_layout()?;
        assert_eq!(collectives(&world), Vec::<&str>::new());
        assert_eq!(gradients.get(&layer.weight.get())?.placements(), [Shard(0)]);
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn a_tensor_parallel_mlp_reduces_once_forward_and_once_backward() {
    let run = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let built = Builder::new(&mesh).placed(|path, _| match path {
            "up.weight" | "up.bias" => vec![Shard(0)],
            "down.weight" => vec![Shard(1)],
            _ => vec![Replicate],
        });
        let mlp = Mlp::new(&built, 8, 16, Activation::Gelu)?;
        let x = DTensor::randn((4, 8), &mesh, [Replicate])?.requires_grad();
        world.trace().clear();
        let y = mlp.forward(&x)?.redistribute([Replicate])?;
        assert_eq!(collectives(&world), ["all_reduce"]);
        world.trace().clear();
        let gradients = y.square()?.sum_all()?.backward()?;
        let of_input = gradients.get(&x)?.redistribute([Replicate])?;
        assert_eq!(collectives(&world), ["all_reduce"]);
        assert_eq!(of_input.shape(), [4, 8]);
        world.trace().clear();
        gradients.in_param_layout()?;
        assert_eq!(collectives(&world).len(), 1, "the gradient of the input again: {:?}", collectives(&world));
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

/// One step of a model of linear layers whose weights are sharded over all ranks.
fn sharded_step(world: &World, ranks: usize, width: usize) -> Result<usize> {
    let mesh = world.mesh([("dp", ranks)])?;
    let built = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
    let layers = (0..12).map(|i| Linear::without_bias(&built.child(&i.to_string()), width, width));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let x = DTensor::zeros((ranks, width), DType::F32, &mesh, [Shard(0)])?;
    world.memory().reset_peak();
    let y = layers.iter().try_fold(x, |x, layer| layer.forward(&x))?;
    let gradients = y.sum_all()?.backward()?.in_param_layout()?;
    assert_eq!(gradients.len(), 12);
    Ok(world.memory().peak())
}

#[test]
fn memory_per_rank_falls_with_the_number_of_ranks() {
    const WIDTH: usize = 256;
    let layer = WIDTH * WIDTH * 4;
    for ranks in [1, 2, 4] {
        let real = ThreadWorld::new(ranks).unwrap().run(move |world| sharded_step(&world, ranks, WIDTH)).unwrap();
        let dry = DryWorld::new(ranks).unwrap().run(move |world| sharded_step(&world, ranks, WIDTH)).unwrap();
        assert_eq!(dry.value, real[0], "{ranks} ranks");
        // weights and gradients of the shards, and what one layer needs whole at one time
        let shards = 2 * 12 * layer / ranks;
        assert!(real[0] >= shards, "{ranks} ranks: {}", real[0]);
        assert!(real[0] <= shards + 3 * layer, "{ranks} ranks: {} beyond {shards}", real[0] - shards);
    }
}

#[test]
fn activation_checkpointing_gives_the_same_gradients_with_dropout() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        // In f64: the two passes add the terms of the gradient of `w` in different orders.
        let x = DTensor::randn((6, 8), &mesh, [Shard(0)])?.to_dtype(DType::F64)?.requires_grad();
        let w = DTensor::randn((8, 8), &mesh, [Replicate])?.to_dtype(DType::F64)?.requires_grad();
        let block = |x: &DTensor, w: &DTensor| x.matmul(w)?.gelu()?.dropout(0.4, true)?.matmul(w);
        mesh.manual_seed(3);
        let plain = block(&block(&x, &w)?, &w)?.square()?.sum_all()?.backward()?;
        mesh.manual_seed(3);
        let step = |x: &DTensor| {
            let inner = w.clone();
            Ok::<_, Error>(checkpoint_activations(&[x], move |x| Ok(vec![block(&x[0], &inner)?]))?.swap_remove(0))
        };
        let loss = step(&step(&x)?)?.square()?.sum_all()?;
        let after = mesh.generator().state();
        let replayed = loss.backward()?;
        assert_eq!(mesh.generator().state(), after, "replaying draws nothing new");
        for leaf in [&x, &w] {
            let (a, b) = (plain.get(leaf)?.full_tensor()?, replayed.get(leaf)?.full_tensor()?);
            assert!(close(&a, &b, 1e-13), "{a} {b}");
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn second_derivatives_are_gradients_of_gradients() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let layout = [Shard(0)];
        let x = DTensor::from_fn(6, DType::F64, &mesh, layout.clone(), |i| 0.3 * i[0] as f64 - 0.7)?.requires_grad();
        // (tanh(x)^3)'' = 6 t (1 - t^2)^2 - 6 t^3 (1 - t^2), and the same of products, softmax and norms by differences
        let first = x.tanh()?.pow_scalar(3.0)?.sum_all()?.backward_graph()?;
        let second = first.get(&x)?.sum_all()?.backward()?;
        let t = no_grad(|| x.tanh())?;
        let s = t.square()?.rsub_scalar(1.0)?;
        let expected = t.mul(&s.square()?)?.mul_scalar(6.0)?.sub(&t.pow_scalar(3.0)?.mul(&s)?.mul_scalar(6.0)?)?;
        assert!(close(&second.get(&x)?.full_tensor()?, &expected.full_tensor()?, 1e-12));
        let loss = |x: &DTensor| {
            let rows = x.reshape(&[2, 3])?;
            let normed = rows.layer_norm(1, None, None, 0.1)?.mul(&rows.softmax(-1)?)?;
            rows.matmul(&rows.t()?)?.sum_all()?.add(&normed.gelu()?.mul(&rows)?.sum_all()?)
        };
        let weights = DTensor::from_fn(6, DType::F64, &mesh, layout, |i| 1.0 + i[0] as f64)?;
        let slope = |x: &DTensor| loss(x)?.backward_graph()?.get(x)?.mul(&weights)?.sum_all();
        let second = slope(&x)?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f64>()?;
        for (i, second) in second.iter().enumerate() {
            let moved = |step: f64| -> Result<f64> {
                let unit = DTensor::from_fn(6, DType::F64, &mesh, [Replicate], |at| f64::from(u8::from(at[0] == i)))?;
                let x = x.detach().add(&unit.mul_scalar(step)?)?.requires_grad();
                slope(&x)?.full_tensor()?.to_scalar().map_err(Error::from)
            };
            let difference = (moved(1e-5)? - moved(-1e-5)?) / 2e-5;
            assert!((difference - second).abs() < 1e-5 * second.abs().max(1.0), "{i}: {second} and {difference}");
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn gradients_flow_through_redistribution_meshes_and_dtypes() {
    let run = |world: World| {
        let (mesh, other) = (world.mesh([("a", 2), ("b", 2)])?, world.mesh([("c", 4)])?);
        let x = DTensor::from_fn((4, 6), DType::F64, &mesh, [Shard(0), Shard(1)], |i| (i[0] * 6 + i[1]) as f64)?;
        let x = x.requires_grad();
        let moved = x.redistribute([Replicate, Shard(0)])?.to_mesh(&other, [Shard(1)])?.to_dtype(DType::F32)?;
        let gradients = moved.square()?.sum_all()?.backward()?;
        let gradient = gradients.get(&x)?;
        assert_eq!((gradient.dtype(), gradient.device_mesh() == &mesh), (DType::F64, true));
        assert!(close(&gradient.full_tensor()?, &(x.full_tensor()? * 2.0)?, 1e-6));
        // tensors that are not leaves or unused have no gradient: an error
        let unused = x.detach().requires_grad();
        assert!(gradients.get(&unused).unwrap_err().to_string().contains("depends on"));
        assert!(x.detach().sum_all()?.backward().unwrap_err().to_string().contains("requires_grad"));
        assert!(x.square()?.backward().unwrap_err().to_string().contains("single number"));
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

/// A model of every kind of layer.
#[derive(Module)]
struct Everything {
    embedding: Embedding,
    bags: EmbeddingBag,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    mlp: Mlp,
    gated: SwiGlu,
    rms: RmsNorm,
    conv: Conv2d,
    groups: GroupNorm,
    batch: BatchNorm,
    dropout: Dropout,
    heads: Vec<Linear>,
    width: usize,
}

impl Everything {
    fn new(builder: &Builder) -> Result<Self> {
        let attention = AttentionConfig {
            width: 8,
            heads: 4,
            key_heads: 2,
            causal: true,
            rotary: Some(RotaryEmbedding { base: 100.0 }),
            bias: true,
            window: Some(2),
            soft_cap: Some(5.0),
            dropout: 0.25,
        };
        Ok(Everything {
            embedding: Embedding::new(&builder.child("embedding"), 11, 8)?,
            bags: EmbeddingBag::new(&builder.child("bags"), 11, 8, EmbeddingBagMode::Mean)?,
            attention: MultiHeadAttention::new(&builder.child("attention"), attention)?,
            norm: LayerNorm::new(&builder.child("norm"), 8, 1e-5)?,
            mlp: Mlp::new(&builder.child("mlp"), 8, 16, Activation::GeluTanh)?,
            gated: SwiGlu::new(&builder.child("gated"), 8, 12)?,
            rms: RmsNorm::new(&builder.child("rms"), 8, 1e-6)?,
            conv: Conv2d::new(&builder.child("conv"), Conv2dOptions::new(1, 4, 3).padding(1))?,
            groups: GroupNorm::new(&builder.child("groups"), 2, 4, 1e-5)?,
            batch: BatchNorm::new(&builder.child("batch"), 4, 0.1, 1e-5)?,
            dropout: Dropout::new(0.2)?,
            heads: vec![
                Linear::new(&builder.child("heads.0"), 8, 11)?,
                Linear::without_bias(&builder.child("heads.1"), 8, 11)?,
            ],
            width: 8,
        })
    }

    fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let bag = self.bags.forward(ids)?.unsqueeze(1)?;
        let x = self.embedding.forward(ids)?.add(&bag)?;
        let x = x.add(&self.attention.forward(&self.norm.forward(&x)?)?)?;
        let x = x.add(&self.mlp.forward(&x)?)?;
        let x = self.dropout.forward(&self.rms.forward(&x.add(&self.gated.forward(&x)?)?)?)?;
        let planes = self.batch.forward(&self.groups.forward(&self.conv.forward(&x.unsqueeze(1)?)?)?)?;
        let x = x.add(&planes.mean(&[1], false)?)?;
        let logits = self.heads.iter().map(|head| head.forward(&x)).collect::<Result<Vec<_>>>()?;
        let logits = logits[0].add(&logits[1])?.flatten(0, 1)?;
        assert_eq!(self.width, x.shape()[2]);
        logits.cross_entropy(&targets.flatten(0, -1)?, LossOptions::default())
    }
}

/// Placements by path and shape.
type Places = fn(&str, &[usize]) -> Vec<Placement>;

/// Loss, gradients by name and running statistics of the model in some layout.
fn run_everything(mesh: &DeviceMesh, places: Places, batch: Vec<Placement>) -> Result<Vec<(String, Tensor)>> {
    mesh.manual_seed(11);
    let model = Everything::new(&Builder::new(mesh).placed(places))?;
    let table = |salt: usize| move |i: &[usize]| ((i[0] * 7 + i[1] * 3 + salt) % 11) as f64;
    let ids = DTensor::from_fn((4, 5), DType::I64, mesh, batch.clone(), table(1))?;
    let targets = DTensor::from_fn((4, 5), DType::I64, mesh, batch, table(5))?;
    let loss = model.loss(&ids, &targets)?;
    let gradients = loss.backward()?.in_param_layout()?;
    let mut all = vec![("loss".to_string(), loss.full_tensor()?)];
    for (name, param) in model.named_parameters() {
        let gradient = gradients.get(&param.get())?;
        assert_eq!(gradient.layout(), &param.layout(), "{name}");
        all.push((name, gradient.full_tensor()?));
    }
    for (name, buffer) in model.named_buffers() {
        all.push((name, buffer.get().full_tensor()?));
    }
    model.eval();
    all.push(("in use".to_string(), model.loss(&ids, &targets)?.full_tensor()?));
    Ok(all)
}

#[test]
fn a_model_of_all_layers_gives_the_same_result_in_every_layout() {
    let run = |world: World| {
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let expected = run_everything(&alone, |_, _| vec![Replicate], vec![Replicate])?;
        assert!(expected.len() > 30, "{}", expected.len());
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let tensor_parallel = |path: &str, shape: &[usize]| {
            let cut = match path.rsplit_once('.') {
                Some((
                    "mlp.up" | "gated.gate" | "gated.up" | "attention.query" | "attention.key" | "attention.value",
                    _,
                )) => Shard(0),
                Some(("mlp.down" | "gated.down" | "attention.output", "weight")) => Shard(1),
                Some(("embedding" | "heads.0" | "heads.1", _)) => Shard(0),
                _ => Replicate,
            };
            let data = if shape[0].is_multiple_of(2) && cut == Replicate { Shard(0) } else { Replicate };
            vec![data, cut]
        };
        let layouts: [(Places, [Placement; 2]); 4] = [
            (|_, _| vec![Replicate, Replicate], [Shard(0), Replicate]),
            (|_, _| vec![Shard(0), Shard(0)], [Shard(0), Shard(0)]),
            (|_, shape| vec![Replicate, Shard(shape.len() as isize - 1)], [Shard(0), Shard(1)]),
            (tensor_parallel, [Shard(0), Replicate]),
        ];
        for (i, (places, batch)) in layouts.into_iter().enumerate() {
            let got = run_everything(&mesh, places, batch.to_vec())?;
            for ((name, got), (_, expected)) in got.iter().zip(&expected) {
                assert!(close(got, expected, 2e-4), "layout {i}: {name}: {got}, expected {expected}");
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn initializers_do_not_depend_on_the_layout_and_have_the_documented_variance() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 3)])?;
        let shape = [60, 50];
        let variance = |fan: f64| 1.0 / fan;
        for (init, expected) in [
            (Init::KaimingNormal(2f64.sqrt()), 2.0 * variance(50.0)),
            (Init::KaimingUniform(1.0), variance(50.0)),
            (Init::XavierNormal(1.0), 2.0 * variance(110.0)),
            (Init::XavierUniform(1.0), 2.0 * variance(110.0)),
            (Init::LINEAR, variance(150.0)),
            (Init::Normal(0.0, 0.5), 0.25),
            // the variance of a standard normal distribution truncated at two
            (Init::TruncNormal(1.0), 0.774),
        ] {
            let make = |placements: Placement| {
                mesh.manual_seed(5);
                init.create(&shape, DType::F64, &mesh, [placements])
            };
            let (whole, sharded) = (make(Replicate)?, make(Shard(0))?);
            assert!(whole.equal(&sharded)?, "{init:?}");
            let var = whole.var(&[], 0.0, false)?.item::<f64>()?;
            assert!((var / expected - 1.0).abs() < 0.08, "{init:?}: {var}, expected {expected}");
            if init == Init::TruncNormal(1.0) {
                assert!(whole.abs()?.amax(&[], false)?.item::<f64>()? <= 2.0);
            }
        }
        Ok(())
    };
    ThreadWorld::new(3).unwrap().run(run).unwrap();
}

#[test]
fn state_dicts_load_into_other_modules_and_layouts_or_not_at_all() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let source = Everything::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
        let target = Everything::new(&Builder::new(&mesh))?;
        let names: Vec<(String, &str)> = target.named_modules();
        assert_eq!(names[0], (String::new(), "Everything"));
        assert!(names.contains(&("heads.1".to_string(), "Linear")));
        target.load_state_dict(&source.state_dict())?;
        let (a, b) = (source.mlp.up.weight.get(), target.mlp.up.weight.get());
        assert_eq!(b.placements(), [Replicate]);
        assert!(a.equal(&b)?);
        let mut state = source.state_dict();
        let weight = state.remove("norm.weight").unwrap();
        state.insert("norm.wait".to_string(), weight);
        state.insert("rms.weight".to_string(), DTensor::zeros(7, DType::F32, &mesh, [Replicate])?);
        let before = target.rms.weight.get();
        let error = target.load_state_dict(&state).unwrap_err().to_string();
        assert!(["norm.weight", "norm.wait", "rms.weight"].iter().all(|n| error.contains(n)), "{error}");
        assert!(target.rms.weight.get().equal(&before)?);
        target.to_dtype(DType::BF16)?;
        assert_eq!(target.rms.weight.dtype(), DType::BF16);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn gradients_keep_an_explicit_shard_order() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2), ("a", 2), ("b", 2)])?;
        let turned = |seed: usize| -> Result<DTensor> {
            let order: &[(usize, &[&str])] = &[(0, &["b", "a"])];
            let layout = Layout::with_shard_order(mesh.mesh(), 8, [Replicate, Shard(0), Shard(0)], order)?;
            let plain = DTensor::from_fn(8, DType::F64, &mesh, vec![Replicate; 3], |i| (i[0] * seed) as f64)?;
            Ok(plain.to_layout(&layout)?.requires_grad())
        };
        let (v, w) = (turned(1)?, turned(3)?);
        let x = DTensor::from_fn((16, 8), DType::F64, &mesh, [Shard(0), Shard(1), Shard(1)], |i| {
            (i[0] + 10 * i[1]) as f64
        })?;
        let loss = v.mul(&x)?.sum_all()?.add(&w.mul(&x)?.square()?.sum_all()?)?;
        let gradients = loss.backward()?.in_param_layout()?;
        let expected: Vec<f64> = (0..8).map(|j| (0..16).map(|i| f64::from(i + 10 * j)).sum()).collect();
        assert_eq!(gradients.get(&v)?.layout(), v.layout());
        assert_eq!(gradients.get(&v)?.full_tensor()?.to_vec1::<f64>()?, expected);
        // and so does code on local parts
        let placements = vec![Partial(ReduceOp::Avg), Partial(ReduceOp::Sum), Partial(ReduceOp::Sum)];
        let y = local_map(&[&v], placements, &[], |v| v[0].sqr()?.sum_all())?;
        let found = y.backward()?.get(&v)?.full_tensor()?.to_vec1::<f64>()?;
        assert_eq!(found, (0..8).map(f64::from).collect::<Vec<_>>()); // 2 v, halved by the mean over dp
        let refused = local_map(&[&v], [Replicate, Replicate, Partial(ReduceOp::Max)], &[], |v| Ok(v[0].clone()));
        assert!(refused.unwrap_err().to_string().contains("local_map"));
        Ok(())
    };
    ThreadWorld::new(8).unwrap().run(run).unwrap();
}

#[test]
fn a_model_built_on_another_thread_has_all_its_gradients() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let make =
            move || (0..50).map(|_| Ok(DTensor::ones(3, DType::F64, &mesh, [Shard(0)])?.requires_grad())).collect();
        let leaves: Result<Vec<DTensor>> = std::thread::spawn(make).join().expect("no panic");
        let w = leaves?.pop().expect("fifty");
        let loss = w.square()?.sum_all()?.add(&w.mul_scalar(3.0)?.sum_all()?)?;
        assert_eq!(loss.backward()?.get(&w)?.full_tensor()?.to_vec1::<f64>()?, [5.0; 3]);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn extreme_dtypes_and_indices_give_correct_results() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        // class 0 of an unsigned target is an ordinary class
        let logits = DTensor::from_fn((4, 3), DType::F64, &mesh, [Shard(0)], |i| (i[0] * i[1]) as f64)?;
        let loss = |dtype: DType| -> Result<f64> {
            let target = DTensor::from_fn(4, dtype, &mesh, [Shard(0)], |i| (i[0] % 2) as f64)?;
            logits.cross_entropy(&target, LossOptions::default())?.item()
        };
        assert_eq!(loss(DType::U8)?, loss(DType::I64)?);
        // products of integers wrap alike in every layout
        for placements in [[Replicate, Replicate], [Shard(1), Shard(0)]] {
            let [left, right] = placements;
            let a = DTensor::full(100.0, (1, 4), DType::U8, &mesh, [left])?;
            let b = DTensor::ones((4, 1), DType::U8, &mesh, [right])?;
            assert_eq!(a.matmul(&b)?.full_tensor()?.to_vec2::<u8>()?, [[144]]);
        }
        let x = DTensor::zeros((3, 4), DType::I64, &mesh, [Shard(0)])?;
        let index = |i: f64| DTensor::full(i, 1, DType::I64, &mesh, [Replicate]);
        let one = DTensor::ones(1, DType::I64, &mesh, [Replicate])?;
        let put = x.index_put(&[&index(1.0)?, &index(-1.0)?], &one, false)?.full_tensor()?.to_vec2::<i64>()?;
        assert_eq!(put, [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]);
        assert!(x.index_put(&[&index(0.0)?, &index(5.0)?], &one, false).unwrap_err().to_string().contains("index_put"));
        assert_eq!(x.slice(0, 1, None, usize::MAX)?.shape(), [1, 4]);
        assert!(DTensor::einsum("\u{e9}a->a", &[&x]).is_err());
        // the gradient of a running sum does not cancel
        let y = DTensor::ones(3, DType::F64, &mesh, [Shard(0)])?.requires_grad();
        let weights =
            DTensor::from_fn(3, DType::F64, &mesh, [Shard(0)], |i| if i[0] == 0 { f64::INFINITY } else { 1.0 })?;
        let gradient = y.cumsum(0)?.backward_from(&weights)?.get(&y)?.full_tensor()?.to_vec1::<f64>()?;
        assert_eq!(gradient, [f64::INFINITY, 2.0, 1.0]);
        let again = y.cumprod(0)?.sum_all()?.backward_graph();
        assert!(again.unwrap_err().to_string().contains("cumprod"));
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
