//! Low-rank adapters: the values of the formula, in every layout of the weight; frozen parameters; merging.

use shardwise::nn::{Activation, Builder, Forward, Linear, Lora, Mlp, Module, lora_adapters};
use shardwise::optim::{AdamW, ParamGroup};
use shardwise::prelude::*;

const WIDTH: usize = 5;
const HIDDEN: usize = 7;

fn full(tensor: &DTensor) -> Vec<f64> {
    tensor.detach().full_tensor().unwrap().flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn input(mesh: &DeviceMesh) -> Result<DTensor> {
    let placements = (0..mesh.ndim()).map(|_| Replicate).collect::<Vec<_>>();
    DTensor::from_fn((6, WIDTH), DType::F64, mesh, placements, |i| ((i[0] * 5 + i[1] * 3) % 11) as f64 / 4.0 - 1.0)
}

/// Placements of the weights of `up` and `down`, by the number of mesh axes.
type Layouts = fn(&str) -> Vec<Placement>;

const ONE_AXIS: [(&str, usize, Layouts); 5] = [
    ("replicated", 2, |_| vec![Replicate]),
    ("columns, then rows", 3, |path| match path {
        "up.weight" | "up.bias" => vec![Shard(0)],
        "down.weight" => vec![Shard(1)],
        _ => vec![Replicate],
    }),
    ("fully sharded", 2, |_| vec![Shard(0)]),
    ("uneven", 2, |path| match path {
        "up.weight" | "up.bias" => vec![Placement::ragged(0, [6, 1])],
        "down.weight" => vec![Placement::ragged(1, [6, 1])],
        _ => vec![Replicate],
    }),
    ("an empty rank", 3, |path| match path {
        "up.weight" | "up.bias" => vec![Placement::ragged(0, [4, 0, 3])],
        "down.weight" => vec![Placement::ragged(1, [4, 0, 3])],
        _ => vec![Replicate],
    }),
];

/// Losses of four steps, the output afterwards and the output of the merged model.
fn trained(
    world: &World,
    mesh: &DeviceMesh,
    layouts: impl Fn(&str) -> Vec<Placement> + Send + Sync + 'static,
) -> Result<[Vec<f64>; 3]> {
    mesh.manual_seed(4);
    let builder = Builder::new(mesh).dtype(DType::F64).placed(move |path, _| layouts(path));
    let mlp = Mlp::new(&builder, WIDTH, HIDDEN, Activation::Gelu)?;
    let lora = Lora { rank: 2, alpha: 3.0, ..Lora::default() };
    let paths = lora.apply(&mlp, |_| true)?;
    assert_eq!(paths, ["down", "up"]);
    let frozen = |mlp: &Mlp| [full(&mlp.up.weight.get()), full(&mlp.down.weight.get())];
    let before = frozen(&mlp);
    let mut optimizer = ParamGroup::new(AdamW::default()).with_lr(0.05).over(&mlp)?;
    assert_eq!(
        optimizer.params().map(|(name, _)| name).collect::<Vec<_>>(),
        ["up.lora_a", "up.lora_b", "down.lora_a", "down.lora_b"]
    );
    let x = input(mesh)?;
    let mut losses = Vec::new();
    for _ in 0..4 {
        let loss = mlp.forward(&x)?.square()?.mean_all()?;
        losses.push(loss.item::<f64>()?);
        let gradients = loss.backward()?;
        assert_eq!(gradients.len(), 4, "frozen weights have no gradient");
        optimizer.step(gradients)?;
    }
    assert_eq!(frozen(&mlp), before, "frozen weights stay as they are");
    let output = full(&mlp.forward(&x)?);
    world.trace().clear();
    lora.merge(&mlp)?;
    assert!(lora_adapters(&mlp).is_empty() && mlp.trainable_parameters().len() == 4);
    assert_ne!(frozen(&mlp), before);
    let merged = full(&mlp.forward(&x)?);
    Ok([losses, output, merged])
}

fn close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{what}: {found}, expected {expected}");
    }
}

fn one_rank() -> [Vec<f64>; 3] {
    let run = |world: World| trained(&world, &world.mesh([("one", 1)])?, |_| vec![Replicate]);
    ThreadWorld::new(1).unwrap().run(run).unwrap().swap_remove(0)
}

#[test]
fn adapters_train_as_on_one_rank_in_every_layout() {
    let expected = one_rank();
    assert!(expected[0][3] < expected[0][0], "the adapters learn: {:?}", expected[0]);
    close(&expected[2], &expected[1], "merged on one rank");
    for (name, ranks, layouts) in ONE_AXIS {
        let run = move |world: World| trained(&world, &world.mesh([("tp", ranks)])?, layouts);
        for found in ThreadWorld::new(ranks).unwrap().run(run).unwrap() {
            found.iter().zip(&expected).for_each(|(found, expected)| close(found, expected, name));
        }
    }
    let both = |path: &str| match path {
        "up.weight" => vec![Shard(1), Shard(0)],
        "up.bias" => vec![Replicate, Shard(0)],
        "down.weight" => vec![Shard(0), Shard(1)],
        _ => vec![Replicate, Replicate],
    };
    let run = move |world: World| trained(&world, &world.mesh([("dp", 2), ("tp", 2)])?, both);
    for found in ThreadWorld::new(4).unwrap().run(run).unwrap() {
        found.iter().zip(&expected).for_each(|(found, expected)| close(found, expected, "two axes"));
    }
}

#[test]
fn the_output_is_that_of_the_formula() {
    launch(1, |world| {
        let mesh = world.mesh([("one", 1)])?;
        let layer = Linear::new(&Builder::new(&mesh).dtype(DType::F64), WIDTH, 3)?;
        let plain = full(&layer.forward(&input(&mesh)?)?);
        let lora = Lora { rank: 2, alpha: 6.0, dropout: 0.0 };
        lora.apply(&layer, |_| true)?;
        assert_eq!(full(&layer.forward(&input(&mesh)?)?), plain, "B starts at zero");
        let (a, b) = &lora_adapters(&layer)[""];
        b.set(&DTensor::from_fn((3, 2), DType::F64, &mesh, [Replicate], |i| (i[0] + 2 * i[1]) as f64)?)?;
        let (a, b, x) = (full(&a.get()), full(&b.get()), full(&input(&mesh)?));
        let product = |row: usize, out: usize| -> f64 {
            let few = |r: usize| (0..WIDTH).map(|i| x[row * WIDTH + i] * a[r * WIDTH + i]).sum::<f64>();
            3.0 * (0..2).map(|r| few(r) * b[out * 2 + r]).sum::<f64>()
        };
        let expected: Vec<f64> = (0..18).map(|i| plain[i] + product(i / 3, i % 3)).collect();
        close(&full(&layer.forward(&input(&mesh)?)?), &expected, "formula");
        Ok(())
    })
    .unwrap();
}

#[test]
fn adapters_of_sharded_layers_communicate_no_more_than_the_layers() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let builder = Builder::new(&mesh).placed(|path, _| ONE_AXIS[1].2(path));
        let mlp = Mlp::new(&builder, WIDTH, HIDDEN, Activation::Gelu)?;
        Lora::default().apply(&mlp, |_| true)?;
        let x = input(&mesh)?.to_dtype(DType::F32)?;
        world.trace().clear();
        let y = mlp.forward(&x)?;
        assert_eq!(y.placements(), [Partial(ReduceOp::Sum)], "one reduction follows, as without adapters");
        let few = 4 * 6 * Lora::default().rank;
        let bytes: usize = world.trace().records().iter().map(|record| record.bytes).sum();
        assert!(bytes <= few, "{bytes} bytes, {:?}", world.trace().records());
        Ok(())
    })
    .unwrap();
}

#[test]
fn half_precision_layers_have_adapters_in_f32() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let builder = Builder::new(&mesh).dtype(DType::BF16).placed(|_, _| vec![Shard(0)]);
        let layer = Linear::new(&builder, WIDTH, 4)?;
        let lora = Lora { rank: 1, ..Lora::default() };
        lora.apply(&layer, |_| true)?;
        assert!(lora_adapters(&layer).values().all(|(a, b)| (a.dtype(), b.dtype()) == (DType::F32, DType::F32)));
        let y = layer.forward(&input(&mesh)?.to_dtype(DType::BF16)?)?;
        assert_eq!(y.dtype(), DType::BF16);
        y.square()?.sum_all()?.backward()?;
        lora.merge(&layer)?;
        assert_eq!((layer.weight.dtype(), layer.weight.get().placements().to_vec()), (DType::BF16, vec![Shard(0)]));
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_settings_and_targets_change_nothing() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let mlp = Mlp::new(&Builder::new(&mesh), WIDTH, HIDDEN, Activation::Gelu)?;
        let message =
            |lora: Lora, target: &'static str| lora.apply(&mlp, move |path| path == target).unwrap_err().to_string();
        assert!(message(Lora { rank: 0, ..Lora::default() }, "up").contains("rank 0"));
        assert!(message(Lora { dropout: 1.0, ..Lora::default() }, "up").contains("dropout 1"));
        assert!(message(Lora { alpha: f64::NAN, ..Lora::default() }, "up").contains("alpha NaN"));
        let error = message(Lora::default(), "upward");
        assert!(error.contains("no linear layer") && error.contains("`up`"), "{error}");
        assert_eq!(mlp.trainable_parameters().len(), 4);
        Lora::default().apply(&mlp, |path| path == "up")?;
        let error = message(Lora::default(), "up");
        assert!(error.contains("`up` already"), "{error}");
        mlp.set_requires_grad(false);
        let error = AdamW::default().over(&mlp).err().expect("an error").to_string();
        assert!(error.contains("all of them frozen"), "{error}");
        Ok(())
    })
    .unwrap();
}
