//! Error messages name the operator or call of the program and the offending value.

use shardwise::ops::LossOptions;
use shardwise::prelude::*;
use shardwise::{detect_anomaly, no_grad};

fn refused(ranks: usize, program: impl Fn(World) -> Result<()> + Send + Sync + 'static) -> String {
    let world = ThreadWorld::new(ranks).unwrap().deadline(std::time::Duration::from_secs(20));
    world.run(program).unwrap_err().to_string()
}

#[test]
fn different_seeds_are_an_error_that_names_them() {
    let error = refused(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        mesh.manual_seed(7 + world.rank() as u64);
        DTensor::randn(4, &mesh, [Shard(0)]).map(drop)
    });
    assert!(error.contains("seeds differ") && error.contains("[7, 0]") && error.contains("[8, 0]"), "{error}");
    let error = refused(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        if world.rank() == 1 {
            let mut state = mesh.generator().state();
            state.offset += 1;
            mesh.generator().set_state(state);
        }
        DTensor::randn(4, &mesh, [Shard(0)]).map(drop)
    });
    assert!(error.contains("drawn more often") && !error.contains("seeds differ"), "{error}");
}

#[test]
fn a_bad_class_index_names_the_loss() {
    for placements in [[Replicate], [Shard(0)], [Shard(1)]] {
        for name in ["cross_entropy", "nll_loss"] {
            let placements = placements.clone();
            let error = refused(2, move |world| {
                let mesh = world.mesh([("dp", 2)])?;
                let logits = DTensor::zeros((4, 7), DType::F32, &mesh, placements.clone())?;
                let target = DTensor::full(9.0, 4, DType::I64, &mesh, [Replicate])?;
                let losses = match name {
                    "nll_loss" => logits.nll_loss(&target, LossOptions::default()),
                    _ => logits.cross_entropy(&target, LossOptions::default()),
                };
                losses.map(drop)
            });
            assert!(error.contains(&format!("class 9 among the targets of {name}")), "{error}");
            assert!(error.contains("classes from 0 to 6") && !error.contains("gather"), "{error}");
            assert!(error.contains("error_messages.rs"), "{error}");
        }
    }
}

#[test]
fn a_nan_error_names_the_operator_that_produced_it() {
    for placement in [Replicate, Shard(0)] {
        let at = placement.clone();
        let forward = refused(2, move |world| {
            let mesh = world.mesh([("dp", 2)])?;
            let x = DTensor::arange(0.0..4.0, DType::F32, &mesh, [at.clone()])?;
            let step = || x.sub_scalar(2.5)?.log()?.add_scalar(1.0)?.sum_all();
            // Without the scope nothing is reported.
            step()?;
            detect_anomaly(step).map(drop)
        });
        assert!(forward.contains("NaN in the result of log at element 0"), "{forward}");
        // Both ranks hold one, and either may be the first to find its own.
        assert!(forward.contains("of the local tensor of rank") && forward.contains("error_messages.rs"), "{forward}");
        let at = placement.clone();
        let backward = refused(2, move |world| {
            let mesh = world.mesh([("dp", 2)])?;
            // 0 * inf: the slope of the square root is infinite where the cotangent is zero
            let x = DTensor::zeros(4, DType::F32, &mesh, [at.clone()])?.requires_grad();
            detect_anomaly(|| x.sqrt()?.mul_scalar(0.0)?.sum_all()?.backward()).map(drop)
        });
        assert!(
            backward.contains("NaN") && backward.contains("in the backward pass of sqrt, called at "),
            "{backward}"
        );
    }
}

#[test]
fn operators_that_propagate_nan_are_distinguished_from_those_that_produce_it() {
    let error = refused(1, |world| {
        let mesh = world.mesh([("dp", 1)])?;
        let x = DTensor::full(f64::NAN, 2, DType::F32, &mesh, [Replicate])?;
        no_grad(|| detect_anomaly(|| x.add_scalar(1.0))).map(drop)
    });
    assert!(error.contains("input(s) 0 had it"), "{error}");
}

#[test]
fn a_nan_error_inside_a_layer_names_the_module() {
    use shardwise::nn::{Activation, Builder, Forward, Mlp};
    let error = refused(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let mlp = Mlp::new(&Builder::new(&mesh).child("blocks.0.mlp"), 8, 16, Activation::Relu)?;
        // weights of both signs: inf - inf
        let x = DTensor::full(f64::INFINITY, (4, 8), DType::F32, &mesh, [Shard(0)])?;
        detect_anomaly(|| mlp.forward(&x)).map(drop)
    });
    assert!(error.contains("`blocks.0.mlp.up`") && error.contains("NaN in result 0 of linear_activation"), "{error}");
    let error = refused(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let mlp = Mlp::new(&Builder::new(&mesh).child("blocks.0.mlp"), 8, 16, Activation::Relu)?;
        let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0)])?;
        let spoilt = DTensor::full(f64::NAN, (4, 8), DType::F32, &mesh, [Shard(0)])?;
        // the NaN comes from a cotangent, so that only the backward pass has it
        detect_anomaly(|| mlp.forward(&x)?.backward_from(&spoilt)).map(drop)
    });
    assert!(error.contains("in the backward pass of") && error.contains("in module `blocks.0.mlp.down`"), "{error}");
}
