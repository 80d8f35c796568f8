//! What the backward pass communicates: statistics and parameters, never activations.

use shardwise::DryWorld;
use shardwise::prelude::*;

/// Bytes that this rank sends while `body` runs.
fn sent<T>(world: &World, body: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    world.trace().clear();
    let value = body()?;
    Ok((value, world.trace().records().iter().map(|r| r.bytes).sum()))
}

/// Bytes that a rank sends forward and backward for a function of a leaf, given a cotangent in the layout of its value.
fn both_ways(
    world: &World,
    x: &DTensor,
    function: impl Fn(&DTensor) -> Result<DTensor>,
) -> Result<(usize, usize, DTensor)> {
    let (y, forward) = sent(world, || function(x))?;
    let cotangent = DTensor::randn(y.shape(), y.device_mesh(), y.layout().reduced().placements().to_vec())?;
    let (gradients, backward) = sent(world, || y.backward_from(&cotangent))?;
    Ok((forward, backward, gradients.get(x)?.clone()))
}

#[test]
fn backward_of_statistics_over_a_sharded_dimension_communicates_statistics_only() {
    let run = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let x = DTensor::randn((512, 512), &mesh, [Shard(1)])?.requires_grad();
        let rows = DTensor::randn((512, 512), &mesh, [Shard(0)])?.requires_grad();
        type Function = fn(&DTensor) -> Result<DTensor>;
        let cases: [(&str, &DTensor, Function); 12] = [
            ("softmax", &x, |x| x.softmax(-1)),
            ("log_softmax", &x, |x| x.log_softmax(-1)),
            ("logsumexp", &x, |x| x.logsumexp(&[-1], false)),
            ("layer_norm", &x, |x| x.layer_norm(1, None, None, 1e-5)),
            ("rms_norm", &x, |x| x.rms_norm(1, None, 1e-5)),
            ("var", &x, |x| x.var(&[-1], 1.0, false)),
            ("batch_norm", &rows, |x| x.batch_norm(None, None, None, 1e-5)),
            ("cumsum", &x, |x| x.cumsum(-1)),
            ("cumprod", &x, |x| x.cumprod(-1)),
            ("cummax", &x, |x| Ok(x.cummax(-1)?.0)),
            ("prod", &x, |x| x.prod(&[-1], false)),
            ("x - mean(x)", &x, |x| x.sub(&x.mean(&[-1], true)?)),
        ];
        // a statistic is one number per row, and an all-reduce of it sends each rank's part twice
        let statistic = 512 * 4;
        for (name, x, function) in cases {
            let (forward, backward, gradient) = both_ways(&world, x, function)?;
            println!("{name}: {forward} forward, {backward} backward, gradient {}", gradient.layout());
            assert!(forward <= 8 * statistic && backward <= 8 * statistic, "{name}: {forward}, {backward}");
            assert_eq!(gradient.layout(), x.layout(), "{name}");
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn backward_of_a_norm_gathers_its_sharded_weight_and_not_the_activations() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = DTensor::randn((8, 128, 64), &mesh, [Shard(0)])?.requires_grad();
        let weight = DTensor::randn(64, &mesh, [Shard(0)])?.requires_grad();
        let bias = DTensor::randn(64, &mesh, [Shard(0)])?.requires_grad();
        for (name, layer) in [("layer_norm", true), ("rms_norm", false)] {
            let (y, forward) = sent(&world, || match layer {
                true => x.layer_norm(1, Some(&weight), Some(&bias), 1e-5),
                false => x.rms_norm(1, Some(&weight), 1e-5),
            })?;
            let (gradients, backward) = sent(&world, || y.square()?.sum_all()?.backward())?;
            println!("{name}: {forward} forward, {backward} backward, {}", gradients.get(&x)?.layout());
            // a vector of 256 bytes each: gathered once more, and its gradient reduced and scattered
            let vectors = if layer { 2 } else { 1 };
            assert!(forward <= vectors * 128 && backward <= (1 + vectors) * 128, "{name}: {forward}, {backward}");
            assert_eq!(gradients.get(&x)?.layout(), x.layout(), "{name}");
            assert_eq!(gradients.get(&weight)?.layout(), weight.layout(), "{name}");
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn norms_of_a_7b_model_gather_no_activations_in_the_backward_pass() {
    // the sizes of a model of 7 billion parameters: weights sharded over dp, sequences over tp
    let run = DryWorld::new(64).unwrap().run(|world| {
        let mesh = world.mesh([("dp", 16), ("tp", 4)])?;
        let x = DTensor::zeros((16, 4096, 4096), DType::F32, &mesh, [Shard(0), Shard(1)])?.requires_grad();
        let weight = DTensor::zeros(4096, DType::F32, &mesh, [Shard(0), Replicate])?.requires_grad();
        let y = x.rms_norm(1, Some(&weight), 1e-5)?;
        let (gradients, backward) = sent(&world, || y.square()?.sum_all()?.backward())?;
        Ok((backward, gradients.get(&x)?.placements().to_vec()))
    });
    let (backward, placements) = run.unwrap().value;
    println!("{backward} bytes backward");
    // the weight is gathered once more and its gradient scattered, each at most its size
    assert!(backward <= 2 * 4096 * 4, "{backward}");
    assert_eq!(placements, [Shard(0), Shard(1)]);
}
