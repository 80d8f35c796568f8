//! Every layer under every kind of plan gives the one-rank result: values, gradients and buffers.

use std::sync::Arc;

use candle_core::Tensor;
use shardwise::nn::{
    Activation, AttentionConfig, BatchNorm, Builder, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Dropout, Embedding,
    EmbeddingBag, GroupNorm, Layer, LayerNorm, Linear, Mlp, Module, MultiHeadAttention, RmsNorm, RotaryEmbedding,
    SwiGlu,
};
use shardwise::ops::EmbeddingBagMode;
use shardwise::optim::ParamGroup;
use shardwise::plan::{
    DataParallel, EmbeddingSharding, FullyShard, ShardingPlan, ShardingPlanner, TargetPlacements, TensorParallel,
    shard_module,
};
use shardwise::prelude::*;

fn close(a: &Tensor, b: &Tensor) -> bool {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && values(a).iter().zip(&values(b)).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs().max(1.0))
}

fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

/// A layer, and the input that it gets: indices below a number, or real numbers.
struct Case {
    name: &'static str,
    make: fn(&Builder) -> Result<Arc<dyn Layer>>,
    shape: &'static [usize],
    below: Option<usize>,
}

fn attention(builder: &Builder, width: usize, heads: usize, key_heads: usize) -> Result<MultiHeadAttention> {
    let rotary = Some(RotaryEmbedding { base: 50.0 });
    let rest = AttentionConfig::default();
    MultiHeadAttention::new(
        builder,
        AttentionConfig { width, heads, key_heads, causal: true, rotary, bias: true, ..rest },
    )
}

/// Every layer, with sizes that four ranks do not divide evenly.
const CASES: &[Case] = &[
    Case { name: "Linear", make: |builder| Ok(Arc::new(Linear::new(builder, 5, 7)?)), shape: &[3, 5], below: None },
    Case {
        name: "Linear without bias",
        make: |builder| Ok(Arc::new(Linear::without_bias(builder, 5, 3)?)),
        shape: &[3, 5],
        below: None,
    },
    Case {
        name: "Embedding",
        make: |builder| Ok(Arc::new(Embedding::new(builder, 7, 5)?)),
        shape: &[3, 4],
        below: Some(7),
    },
    Case {
        name: "EmbeddingBag",
        make: |builder| Ok(Arc::new(EmbeddingBag::new(builder, 7, 5, EmbeddingBagMode::Mean)?)),
        shape: &[3, 4],
        below: Some(7),
    },
    Case {
        name: "LayerNorm",
        make: |builder| Ok(Arc::new(LayerNorm::new(builder, 7, 1e-5)?)),
        shape: &[3, 7],
        below: None,
    },
    Case {
        name: "RmsNorm",
        make: |builder| Ok(Arc::new(RmsNorm::new(builder, 7, 1e-5)?)),
        shape: &[3, 7],
        below: None,
    },
    Case {
        name: "GroupNorm",
        make: |builder| Ok(Arc::new(GroupNorm::new(builder, 3, 6, 1e-5)?)),
        shape: &[3, 6, 5],
        below: None,
    },
    Case {
        name: "BatchNorm",
        make: |builder| Ok(Arc::new(BatchNorm::new(builder, 5, 0.1, 1e-5)?)),
        shape: &[4, 5, 3],
        below: None,
    },
    Case {
        name: "Conv1d",
        make: |builder| Ok(Arc::new(Conv1d::new(builder, Conv1dOptions::new(3, 5, 3).padding(1))?)),
        shape: &[3, 3, 7],
        below: None,
    },
    Case {
        name: "Conv2d",
        make: |builder| Ok(Arc::new(Conv2d::new(builder, Conv2dOptions::new(3, 5, 2))?)),
        shape: &[2, 3, 5, 4],
        below: None,
    },
    Case { name: "Dropout", make: |_| Ok(Arc::new(Dropout::new(0.4)?)), shape: &[3, 7], below: None },
    Case {
        name: "Mlp",
        make: |builder| Ok(Arc::new(Mlp::new(builder, 5, 7, Activation::Gelu)?)),
        shape: &[3, 5],
        below: None,
    },
    Case { name: "SwiGlu", make: |builder| Ok(Arc::new(SwiGlu::new(builder, 5, 7)?)), shape: &[3, 5], below: None },
    Case {
        name: "MultiHeadAttention",
        make: |builder| Ok(Arc::new(attention(builder, 12, 6, 3)?)),
        shape: &[3, 5, 12],
        below: None,
    },
];

/// Output, gradients and buffers of a layer that `make` gives on a mesh.
fn run(
    case: &Case,
    mesh: &DeviceMesh,
    batch: &[Placement],
    make: &dyn Fn(&DeviceMesh) -> Result<Arc<dyn Layer>>,
) -> Result<Vec<(String, Tensor)>> {
    mesh.manual_seed(5);
    let layer = make(mesh)?;
    let index = |at: &[usize]| at.iter().fold(1, |sum, i| sum * 5 + i * 3);
    let x = match case.below {
        Some(n) => DTensor::from_fn(case.shape, DType::I64, mesh, batch.to_vec(), |i| (index(i) % n) as f64)?,
        None => DTensor::from_fn(case.shape, DType::F64, mesh, batch.to_vec(), |i| (index(i) as f64).sin())?,
    };
    mesh.manual_seed(6);
    let y = layer.forward(&x)?;
    let mut all = vec![("output".to_string(), y.full_tensor()?)];
    let params = layer.named_parameters();
    if !params.is_empty() {
        let gradients = y.mul(&y.detach().add_scalar(0.5)?)?.sum_all()?.backward()?.in_param_layout()?;
        for (name, param) in params {
            all.push((name, gradients.get(&param.get())?.full_tensor()?));
        }
    }
    all.extend(layer.named_buffers().into_iter().map(|(n, b)| (n, b.get().full_tensor().expect("no error"))));
    Ok(all)
}

fn plans(case: &Case, layer: &dyn Module, mesh: &DeviceMesh) -> Result<Vec<ShardingPlan>> {
    if case.name == "Dropout" {
        return Ok(vec![ShardingPlan::new().output("", [("tp", Shard(0))])]);
    }
    let everything = |places: TargetPlacements| ShardingPlan::new().param("**", places);
    Ok(vec![
        everything([("tp", Shard(0))].into()),
        everything([("tp", Shard(-1))].into()).output("", [Replicate, Replicate]),
        everything([("tp", Shard(0)), ("dp", Shard(0))].into()),
        everything([Shard(0), Shard(-1)].into()),
        DataParallel::new(["dp", "tp"]).plan(layer, mesh)?,
        FullyShard::new(["dp", "tp"]).plan(layer, mesh)?,
        TensorParallel::new("tp").and(FullyShard::new(["dp"]).on_dim(0)).plan(layer, mesh)?,
        TensorParallel::new("tp").embeddings(EmbeddingSharding::EmbeddingDim).plan(layer, mesh)?,
    ])
}

#[test]
fn every_layer_gives_the_one_rank_result_under_every_plan() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        for case in CASES {
            let whole = |mesh: &DeviceMesh| (case.make)(&Builder::new(mesh).dtype(DType::F64));
            let expected = run(case, &alone(&world)?, &[Replicate], &whole)?;
            for (i, plan) in plans(case, &*whole(&mesh)?, &mesh)?.iter().enumerate() {
                let afterwards = |mesh: &DeviceMesh| {
                    let layer = whole(mesh)?;
                    shard_module(&*layer, mesh, plan)?;
                    Ok(layer)
                };
                let at_once = |mesh: &DeviceMesh| -> Result<Arc<dyn Layer>> {
                    let layer = (case.make)(&plan.builder(mesh).dtype(DType::F64))?;
                    let before: Vec<Layout> = layer.named_parameters().iter().map(|(_, p)| p.layout()).collect();
                    shard_module(&*layer, mesh, plan)?;
                    let after: Vec<Layout> = layer.named_parameters().iter().map(|(_, p)| p.layout()).collect();
                    assert_eq!(before, after, "{}: built where the plan says", case.name);
                    Ok(layer)
                };
                for make in [&afterwards as &dyn Fn(&DeviceMesh) -> Result<Arc<dyn Layer>>, &at_once] {
                    let table = plan.table(&*whole(&mesh)?)?;
                    for (row, (name, param)) in table.0.iter().zip(make(&mesh)?.named_parameters()) {
                        assert_eq!((&row.path, &row.layout), (&name, &param.layout()), "{}", case.name);
                    }
                    for batch in [[Shard(0), Replicate], [Shard(0), Shard(1)]] {
                        let found = run(case, &mesh, &batch, make)?;
                        assert_eq!(found.len(), expected.len());
                        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                            assert!(close(found, expected), "{} plan {i} {name}: {found} {expected}", case.name);
                        }
                    }
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[derive(Module)]
struct TwoLayers {
    up: Linear,
    down: Linear,
}

/// Weights whose sides divide by no number of ranks, by columns and by rows, inputs of one to four dimensions: outputs, gradients
/// and a step of SGD are those of one rank.
#[test]
fn uneven_layers_by_columns_and_rows_step_like_one_rank() {
    launch(4, |world| {
        let (mesh, one) = (world.mesh([("tp", 4)])?, alone(&world)?);
        for (inputs, hidden, outputs) in [(17, 12, 29), (21, 13, 5), (23, 13, 17)] {
            for (up, down) in [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate, Shard(1))]
            {
                for shape in [vec![inputs], vec![3, inputs], vec![2, 3, inputs], vec![2, 1, 3, inputs]] {
                    let run = |mesh: &DeviceMesh, plan: &ShardingPlan| -> Result<Vec<Tensor>> {
                        mesh.manual_seed(2);
                        let builder = Builder::new(mesh).dtype(DType::F64);
                        let model = TwoLayers {
                            up: Linear::new(&builder.child("up"), inputs, hidden)?,
                            down: Linear::new(&builder.child("down"), hidden, outputs)?,
                        };
                        shard_module(&model, mesh, plan)?;
                        let value = |at: &[usize]| (at.iter().fold(1, |sum, i| sum * 5 + i * 3) as f64).sin();
                        let x = DTensor::from_fn(shape.as_slice(), DType::F64, mesh, [Replicate], value)?;
                        let y = model.down.forward(&model.up.forward(&x)?.gelu()?)?;
                        let mut all = vec![y.full_tensor()?];
                        let gradients = y.square()?.sum_all()?.backward()?.in_param_layout()?;
                        for (_, param) in model.named_parameters() {
                            all.push(gradients.get(&param.get())?.full_tensor()?);
                        }
                        let mut optimizer = ParamGroup::new(Sgd::default()).with_lr(0.1).over(&model)?;
                        optimizer.step(gradients)?;
                        for (_, param) in model.named_parameters() {
                            all.push(param.get().full_tensor()?);
                        }
                        Ok(all)
                    };
                    let bias = if up == Shard(0) { Shard(0) } else { Replicate };
                    let plan = ShardingPlan::new()
                        .param("up.weight", [up.clone()])
                        .param("up.bias", [bias])
                        .param("down.weight", [down.clone()]);
                    let (found, expected) = (run(&mesh, &plan)?, run(&one, &ShardingPlan::new())?);
                    assert_eq!((found.len(), expected.len()), (9, 9));
                    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        assert!(
                            close(found, expected),
                            "{inputs}-{hidden}-{outputs} as {up} and {down}, {shape:?}: {i}"
                        );
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}
