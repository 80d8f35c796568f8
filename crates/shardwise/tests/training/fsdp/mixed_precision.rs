//! f32 shards and computation in other types.

use shardwise::nn::{Hooks, Linear, MixedPrecision};
use shardwise::optim::ParamGroup;
use shardwise::plan::fully_shard;
use shardwise::prelude::*;

use crate::fsdp::net::*;

fn policy(dtype: DType) -> MixedPrecision {
    MixedPrecision { param_dtype: Some(dtype), ..MixedPrecision::default() }
}

/// The model's loss with every cast written out.
fn by_hand(net: &Net, x: &DTensor, target: &DTensor, half: DType) -> Result<DTensor> {
    let value = |param: &Param| param.get().to_dtype(half);
    let linear =
        |layer: &Linear, x: &DTensor| x.linear(&value(&layer.weight)?, Some(&value(layer.bias.as_ref().unwrap())?));
    let mut x = linear(&net.first, &x.to_dtype(half)?)?;
    for block in &net.blocks {
        let normal = x.layer_norm(1, Some(&value(&block.norm.weight)?), Some(&value(&block.norm.bias)?), 1e-5)?;
        x = x.add(&linear(&block.down, &linear(&block.up, &normal)?.tanh()?)?)?;
    }
    linear(&net.head, &x)?.to_dtype(target.dtype())?.sub(target)?.square()?.mean_all()
}

#[test]
fn a_policy_equals_casts_by_hand() {
    // one rank: bit by bit
    let run = |world: World| {
        for half in [DType::BF16, DType::F16] {
            let ((mesh, net), (_, plain)) = (reference(&world, 8, DType::F32)?, reference(&world, 8, DType::F32)?);
            net.set_mixed_precision(Some(policy(half)))?;
            let optimizer = |net: &Net| ParamGroup::new(AdamW::default()).with_lr(0.01).over(net);
            let (mut ours, mut theirs) = (optimizer(&net)?, optimizer(&plain)?);
            for step in 0..10 {
                let (x, target) = batch(&mesh, &[Replicate], DType::F32, step)?;
                let (loss, expected) = (net.loss(&x, &target, false)?, by_hand(&plain, &x, &target, half)?);
                assert_eq!(value(&loss)?, value(&expected)?, "{half:?} step {step}");
                ours.step(loss.backward()?)?;
                theirs.step(expected.backward()?)?;
            }
            assert_same_parameters(&net, &plain, 0.0, "by hand")?;
            assert!(net.named_parameters().iter().all(|(_, param)| param.dtype() == DType::F32));
            // and it ends
            net.set_mixed_precision(None)?;
            let (x, target) = batch(&mesh, &[Replicate], DType::F32, 0)?;
            assert_eq!(value(&net.loss(&x, &target, false)?)?, value(&plain.loss(&x, &target, false)?)?);
        }
        Ok(())
    };
    launch(1, run).unwrap();
}

#[test]
fn sharded_weights_are_converted_before_they_are_gathered() {
    for way in WAYS.iter().filter(|way| !way.shard.is_empty()) {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let (net, (one, plain)) = (way.build(&mesh, 8, DType::F32)?, reference(&world, 8, DType::F32)?);
            let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
            let mut sent = Vec::new();
            for policy in [None, Some(MixedPrecision { reduce_dtype: Some(DType::F32), ..policy(DType::BF16) })] {
                net.set_mixed_precision(policy)?;
                net.set_reshard_after_forward(false, way.shard);
                world.trace().clear();
                net.unshard()?;
                sent.push(bytes(&world, "all_gather"));
            }
            assert_eq!(sent[0], 2 * sent[1], "{}", way.name);
            net.set_reshard_after_forward(true, way.shard);
            let optimizer = |net: &Net| ParamGroup::new(AdamW::default()).with_lr(0.01).over(net);
            let (mut ours, mut theirs) = (optimizer(&net)?, optimizer(&plain)?);
            for step in 0..4 {
                let (x, target) = batch(&mesh, &way.batch(), DType::F32, step)?;
                let loss = net.loss(&x, &target, step % 2 == 1)?;
                let (x, target) = batch(&one, &[Replicate], DType::F32, step)?;
                let expected = by_hand(&plain, &x, &target, DType::BF16)?;
                // 8 bits, of sums that ranks round apart
                assert!((value(&loss)? - value(&expected)?).abs() < 2e-2, "{} step {step}", way.name);
                let gradients = loss.backward()?;
                assert!(gradients.iter().all(|gradient| gradient.dtype() == DType::F32));
                ours.step(gradients)?;
                theirs.step(expected.backward()?)?;
            }
            assert!(x.dtype() == DType::F32 && target.dtype() == DType::F32);
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn gradients_are_reduced_and_added_up_in_the_type_that_is_asked_for() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        // each rank contributes 1 + 2^-8 (2 + 2^-7 in all): bf16 has no room for the last bit
        let gradient = |policy: MixedPrecision, micro_batches: usize| -> Result<f64> {
            let layer = Linear::without_bias(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 1, 2)?;
            layer.set_mixed_precision(Some(policy))?;
            let mut sum: Option<Gradients> = None;
            for _ in 0..micro_batches {
                let x = DTensor::from_fn((4, 1), DType::F32, &mesh, [Shard(0)], |i| {
                    if i[0] % 2 == 0 { 1.0 } else { 1.0 / 256.0 }
                })?;
                let new = layer.forward(&x)?.sum_all()?.backward()?;
                sum = Some(match sum {
                    Some(sum) => sum.accumulate(new)?,
                    None => new,
                });
            }
            let sum = sum.expect("one at least").in_param_layout()?;
            let found = sum.get(&layer.weight.get())?;
            assert_eq!(found.dtype(), DType::F32);
            Ok(numbers(&found.full_tensor()?)[1])
        };
        let compute = policy(DType::BF16);
        let exact = 2.0 + 1.0 / 128.0;
        // None: the type of the compute
        assert_eq!(gradient(compute, 1)?, 2.0);
        assert_eq!(gradient(MixedPrecision { reduce_dtype: Some(DType::BF16), ..compute }, 1)?, 2.0);
        assert_eq!(gradient(MixedPrecision { reduce_dtype: Some(DType::F32), ..compute }, 1)?, exact);
        // f32 compute, bf16 reduction
        assert_eq!(gradient(MixedPrecision { reduce_dtype: Some(DType::BF16), ..MixedPrecision::default() }, 1)?, 2.0);
        assert_eq!(gradient(MixedPrecision::default(), 1)?, exact);
        // micro-batches add up in f32
        assert_eq!(gradient(MixedPrecision { reduce_dtype: Some(DType::F32), ..compute }, 3)?, 3.0 * exact);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn a_policy_survives_freezing_and_unfreezing() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let layer = Linear::without_bias(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 1, 2)?;
        layer.set_requires_grad(false);
        layer.set_mixed_precision(Some(MixedPrecision { reduce_dtype: Some(DType::F32), ..policy(DType::BF16) }))?;
        let x =
            DTensor::from_fn((4, 1), DType::F32, &mesh, [Shard(0)], |i| if i[0] % 2 == 0 { 1.0 } else { 1.0 / 256.0 })?;
        let first = no_grad(|| layer.forward(&x))?;
        assert_eq!((first.dtype(), first.has_gradient()), (DType::BF16, false));
        assert!(!layer.forward(&x)?.has_gradient());
        layer.set_requires_grad(true);
        let gradients = layer.forward(&x)?.sum_all()?.backward()?;
        assert_eq!(numbers(&gradients.get(&layer.weight.get())?.full_tensor()?)[0], 2.0 + 1.0 / 128.0);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[derive(Module)]
struct Inner {
    left: Linear,
    hooks: Hooks,
}

impl Inner {
    /// Two inputs: one of a layer, one that is used as it is.
    fn forward(&self, x: &DTensor, y: &DTensor) -> Result<(DTensor, DType)> {
        let mut second = DType::F32;
        let out = self.hooks.run_all(&[x, y], |inputs| {
            second = inputs[1].dtype();
            Ok(vec![self.left.forward(&inputs[0])?.add(&inputs[1].to_dtype(inputs[0].dtype())?)?])
        })?;
        Ok((out[0].clone(), second))
    }
}

#[derive(Module)]
struct Outer {
    first: Linear,
    inner: Inner,
    last: Linear,
}

#[test]
fn one_submodule_computes_in_half_precision() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let built = Builder::new(&mesh);
        let outer = Outer {
            first: Linear::new(&built.child("first"), 6, 6)?,
            inner: Inner {
                left: Linear::new(&built.child("inner").child("left"), 6, 6)?,
                hooks: built.child("inner").hooks(),
            },
            last: Linear::new(&built.child("last"), 6, 6)?,
        };
        fully_shard(&outer, &mesh, &["dp"])?;
        let half = MixedPrecision { output_dtype: Some(DType::F32), ..policy(DType::F16) };
        outer.inner.set_mixed_precision(Some(half))?;
        let (x, _) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        let h = outer.first.forward(&x)?;
        assert_eq!(h.dtype(), DType::F32);
        let (y, second) = outer.inner.forward(&h, &x)?;
        // both inputs were converted, the output back
        assert_eq!((y.dtype(), second), (DType::F32, DType::F16));
        let gradients = outer.last.forward(&y)?.square()?.mean_all()?.backward()?;
        assert_eq!(gradients.len(), 6);
        assert!(gradients.iter().all(|gradient| gradient.dtype() == DType::F32));
        // inputs stay as they are: then the layer refuses two types, or the caller converts
        outer.inner.set_mixed_precision(Some(MixedPrecision { cast_forward_inputs: false, ..half }))?;
        let (y, second) = outer.inner.forward(&h.to_dtype(DType::F16)?, &x)?;
        assert_eq!((y.dtype(), second), (DType::F32, DType::F32));
        // the policy of the whole model ends at the inner one
        outer.set_mixed_precision(Some(policy(DType::BF16)))?;
        outer.inner.set_mixed_precision(Some(half))?;
        let h = outer.first.forward(&x)?;
        assert_eq!(h.dtype(), DType::BF16);
        let (y, _) = outer.inner.forward(&h, &x)?;
        assert_eq!((y.dtype(), outer.last.forward(&y)?.dtype()), (DType::F32, DType::BF16));
        // a module without hooks has no output to convert
        let error = outer.set_mixed_precision(Some(half)).unwrap_err().to_string();
        assert!(error.contains("hooks"), "{error}");
        let error = outer.set_mixed_precision(Some(policy(DType::I64))).unwrap_err().to_string();
        assert!(error.contains("i64 as param_dtype"), "{error}");
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn recomputation_applies_the_same_casts() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let net = way.build(&mesh, 8, DType::F32)?;
        net.set_mixed_precision(Some(policy(DType::BF16)))?;
        for block in &net.blocks {
            block
                .set_mixed_precision(Some(MixedPrecision { output_dtype: Some(DType::F32), ..policy(DType::BF16) }))?;
        }
        let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
        assert_eq!(net.features(&x, true)?.dtype(), DType::F32);
        let (a, b) = (net.loss(&x, &target, false)?, net.loss(&x, &target, true)?);
        assert_eq!(value(&a)?, value(&b)?);
        assert_same_gradients((&net, &a.backward()?), (&net, &b.backward()?), 0.0, "recomputed")
    };
    launch(4, run).unwrap();
}

#[test]
fn half_precision_weights_have_gradients_of_another_type_on_request() {
    let run =
        |world: World| {
            let mesh = world.mesh([("dp", 2)])?;
            let layer =
                Linear::without_bias(&Builder::new(&mesh).dtype(DType::BF16).placed(|_, _| vec![Shard(0)]), 1, 2)?;
            let x = DTensor::from_fn((4, 1), DType::BF16, &mesh, [Shard(0)], |i| {
                if i[0] % 2 == 0 { 1.0 } else { 1.0 / 256.0 }
            })?;
            let gradient = || -> Result<(DType, f64)> {
                let gradients = layer.forward(&x)?.sum_all()?.backward()?;
                let found = gradients.get(&layer.weight.get())?;
                Ok((found.dtype(), numbers(&found.full_tensor()?)[0]))
            };
            assert_eq!(gradient()?, (DType::BF16, 2.0));
            layer.weight.set_grad_dtype(Some(DType::F32))?;
            assert_eq!(gradient()?, (DType::F32, 2.0 + 1.0 / 128.0));
            // steps keep it, and take such gradients
            let mut optimizer = ParamGroup::new(Sgd::default()).with_lr(1.0).over(&layer)?;
            let before = numbers(&layer.weight.get().full_tensor()?)[0];
            optimizer.step(layer.forward(&x)?.sum_all()?.backward()?)?;
            assert_eq!(layer.weight.dtype(), DType::BF16);
            let after = numbers(&layer.weight.get().full_tensor()?)[0];
            assert!((after - (before - 2.0 - 1.0 / 128.0)).abs() < 0.01);
            assert_eq!(gradient()?.0, DType::F32);
            // an unused parameter has none, and zeros are of that type
            let unused = Linear::without_bias(&Builder::new(&mesh).dtype(DType::BF16), 1, 2)?;
            unused.weight.set_grad_dtype(Some(DType::F32))?;
            let gradients = layer.forward(&x)?.sum_all()?.backward()?.with_zeros([unused.weight.get()])?;
            assert_eq!(gradients.get(&unused.weight.get())?.dtype(), DType::F32);
            layer.weight.set_grad_dtype(None)?;
            assert_eq!(gradient()?.0, DType::BF16);
            let error = layer.weight.set_grad_dtype(Some(DType::I64)).unwrap_err().to_string();
            assert!(error.contains("i64") && error.contains("floating-point"), "{error}");
            Ok(())
        };
    launch(2, run).unwrap();
}
