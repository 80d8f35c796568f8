//! Gradient scaling.

use shardwise::checkpoint;
use shardwise::optim::GradScaler;
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

use crate::fsdp::net::*;

/// Gradients of a scaled loss, in which one element of one rank's shard may be infinite or NaN.
fn gradients(net: &Net, mesh: &DeviceMesh, way: &Way, scaler: &GradScaler, bad: Option<f64>) -> Result<Gradients> {
    let (x, target) = batch(mesh, &way.batch(), DType::F32, 0)?;
    let gradients = scaler.scale(&net.loss(&x, &target, false)?)?.backward()?.in_param_layout()?;
    let Some(bad) = bad else { return Ok(gradients) };
    gradients.map(|gradient| {
        let placed = gradient.placements().to_vec();
        let first = move |i: &[usize]| if i.iter().all(|&i| i == 0) { bad } else { 0.0 };
        gradient.add(&DTensor::from_fn(gradient.shape(), DType::F32, mesh, placed, first)?)
    })
}

#[test]
fn an_infinity_on_one_rank_skips_the_step_on_all_and_halves_the_scale() {
    for way in [&WAYS[0], &WAYS[5]] {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let (net, plain) = (way.build(&mesh, 8, DType::F32)?, way.build(&mesh, 8, DType::F32)?);
            let (mut optimizer, mut expected) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
            let mut scaler = GradScaler { scale: 2.0, growth_interval: 2, ..GradScaler::default() };
            for (bad, scale) in [(Some(f64::INFINITY), 1.0), (Some(f64::NAN), 0.5)] {
                let spoiled = gradients(&net, &mesh, way, &scaler, bad)?;
                assert!(!scaler.step(&mut optimizer, spoiled)?);
                assert_eq!((scaler.scale, optimizer.steps()), (scale, 0));
                assert_same_parameters(&net, &plain, 0.0, way.name)?;
            }
            // two good steps double the scale; scaling by a power of two changes no bit
            for scale in [0.5, 1.0, 1.0] {
                let good = gradients(&net, &mesh, way, &scaler, None)?;
                assert!(scaler.step(&mut optimizer, good)?);
                assert_eq!(scaler.scale, scale);
                let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
                expected.step(plain.loss(&x, &target, false)?.backward()?)?;
                assert_same_parameters(&net, &plain, 0.0, way.name)?;
            }
            assert_eq!((scaler.growth_tracker, optimizer.steps()), (1, 3));
            // unscaled by hand, for clipping
            let (unscaled, is_finite) = scaler.unscale(gradients(&net, &mesh, way, &scaler, None)?)?;
            assert!(is_finite && unscaled.len() == 16);
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn the_scale_is_part_of_a_checkpoint() {
    let scratch = Scratch::new("grad-scaler");
    let path = scratch.0.join("run");
    let run = move |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let net = Net::new(&Builder::new(&mesh), 6, 1)?;
        let scaler = GradScaler { scale: 4096.0, growth_tracker: 7, growth_interval: 100, ..GradScaler::default() };
        checkpoint::save_from(&world, &path, (&net, &scaler))?;
        let mut loaded = GradScaler::default();
        checkpoint::load_into(&world, &path, (&net, &mut loaded))?;
        assert_eq!(loaded, scaler);
        // settings that cannot be used are refused, also from a checkpoint
        let broken = GradScaler { scale: -1.0, ..GradScaler::default() };
        assert!(
            broken
                .unscale(net.first.weight.get().sum_all()?.backward()?)
                .unwrap_err()
                .to_string()
                .contains("positive scale")
        );
        checkpoint::save_from_with(&world, path.with_extension("bad"), (&broken,), &Default::default())?;
        assert!(checkpoint::load_into(&world, path.with_extension("bad"), (&mut loaded,)).is_err());
        assert_eq!(loaded, scaler);
        Ok(())
    };
    launch(2, run).unwrap();
}
