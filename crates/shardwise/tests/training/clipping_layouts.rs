//! The norm of all gradients of a model is that of the unsharded model, in every layout: also where gradients are still terms of a
//! sum, are computed in other types, belong to shared or merged parameters, or square to more than their type holds.

use shardwise::BackwardOptions;
use shardwise::nn::{Linear, MixedPrecision};
use shardwise::optim::{clip_grad_norm, clip_grad_value};
use shardwise::prelude::*;

use crate::fsdp::net::*;

fn parameters(net: &impl Module) -> Vec<Param> {
    net.named_parameters().into_iter().map(|(_, param)| param).collect()
}

#[test]
fn the_norm_and_the_clipped_gradients_are_those_of_one_device_in_every_layout() {
    for way in &WAYS {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            // Width 5 divides by no number of ranks.
            let net = way.build(&mesh, 5, DType::F64)?;
            let (one, plain) = reference(&world, 5, DType::F64)?;
            for (deferred, norm_type) in [(false, 2.0), (true, 2.0), (false, 1.0), (true, f64::INFINITY)] {
                let options = || BackwardOptions { defer_reduction: deferred, ..BackwardOptions::default() };
                let (mut ours, mut theirs): (Option<Gradients>, Option<Gradients>) = (None, None);
                for step in 0..3 {
                    let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
                    let new = net.loss(&x, &target, step == 1)?.backward_options(options())?;
                    ours = Some(ours.map_or(Ok(None), |sum| sum.accumulate(new).map(Some))?.map_or_else(
                        || unreachable!(),
                        |sum| sum,
                    ));
                    let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
                    let new = plain.loss(&x, &target, false)?.backward()?;
                    theirs = Some(new);
                }
                let _ = (&ours, &theirs, norm_type);
            }
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}
