//! Forward-mode derivatives: values of PyTorch's `torch.func.jvp`, the same in every layout, and what is refused.

use candle_core::Tensor;
use shardwise::error::ErrorKind;
use shardwise::nn::{LayerNorm, Linear};
use shardwise::op::{self, Gradient, KernelContext, Op, OpPlan};
use shardwise::ops::AttentionOptions;
use shardwise::plan::fully_shard;
use shardwise::prelude::*;
use shardwise::rule::Signature;
use shardwise::tensor::SaveForBackward;
use shardwise::{checkpoint_activations, jvp};

/// Eighths of both signs; the same numbers on every mesh.
fn tensor(mesh: &DeviceMesh, shape: &[usize], salt: usize) -> Result<DTensor> {
    let replicated = vec![Replicate; mesh.ndim()];
    DTensor::from_fn(shape, DType::F64, mesh, replicated, |at| {
        let flat = at.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i);
        ((flat * 7 + salt * 5) % 13) as f64 / 8.0 - 0.75
    })
}

fn list(x: &DTensor) -> Result<Vec<f64>> {
    Ok(x.full_tensor()?.flatten_all()?.to_vec1()?)
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let far = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far < 1e-13, "{what}: {far}, {found:?}");
}

#[derive(Module)]
struct Net {
    up: Linear,
    norm: LayerNorm,
    down: Linear,
}

impl Net {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let builder = Builder::new(mesh).dtype(DType::F64);
        let net = Net {
            up: Linear::new(&builder.child("up"), 6, 5)?,
            norm: LayerNorm::new(&builder.child("norm"), 5, 1e-5)?,
            down: Linear::without_bias(&builder.child("down"), 5, 3)?,
        };
        net.up.weight.set(&tensor(mesh, &[5, 6], 3)?)?;
        net.up.bias.as_ref().expect("a bias").set(&tensor(mesh, &[5], 4)?)?;
        net.down.weight.set(&tensor(mesh, &[3, 5], 5)?)?;
        Ok(net)
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.down.forward(&self.norm.forward(&self.up.forward(x)?)?.tanh()?)?.softmax(-1)
    }
}

/// `torch.func.jvp` of the network, at the numbers above.
const OUTPUT: [f64; 12] = [
    0.183495724722078,
    0.39934552880696345,
    0.4171587464709585,
    0.15734863231564514,
    0.5585993191005242,
    0.2840520485838309,
    0.22255765073875272,
    0.3791032953402916,
    0.3983390539209557,
    0.3149510773785156,
    0.6143878297981629,
    0.07066109282332167,
];
const TANGENT: [f64; 12] = [
    -0.062396513279342126,
    -0.10201911568194585,
    0.16441562896128797,
    -0.1253938964974743,
    0.6245899684490811,
    -0.4991960719516069,
    0.14363581907351747,
    0.15686792993590587,
    -0.3005037490094233,
    -0.12826766314543805,
    0.1440748662850414,
    -0.01580720313960332,
];

/// And of `softmax(q k^T / 2) v` with tangents of all three.
const ATTENTION: [f64; 24] = [
    -0.029766965632128002,
    -0.13084319637123037,
    0.09523303436787202,
    -0.005843196371230347,
    -0.11960265467925373,
    0.0374813422561244,
    0.0053973453207462885,
    0.1624813422561244,
    -0.14144756605105618,
    0.0641805437051916,
    -0.01644756605105617,
    0.18918054370519158,
    0.1054643628766388,
    0.023172037912615632,
    -0.24509232663742797,
    0.14817203791261563,
    0.2088953846764084,
    -0.1344151582065461,
    0.0669691671295144,
    -0.009415158206546093,
    0.22425142140948198,
    -0.15576612215585695,
    0.09219181711178222,
    -0.030766122155856945,
];

#[test]
fn a_sharded_module_has_the_forward_mode_derivative_of_pytorch() {
    for ranks in [1, 2, 3] {
        launch(ranks, move |world| {
            let mesh = world.mesh([("dp", ranks)])?;
            for sharded in [false, true] {
                let net = Net::new(&mesh)?;
                if sharded {
                    fully_shard(&net, &mesh, &["dp"])?;
                    // no forward pass has gathered the weights before
                    net.set_reshard_after_forward(false, &["dp"]);
                }
                for (x, t) in
                    [(Replicate, Replicate), (Shard(0), Replicate), (Shard(0), Shard(1)), (Shard(1), Shard(0))]
                {
                    let what = format!("{ranks} rank(s), sharded: {sharded}, {x}, {t}");
                    let by_features = x == Shard(1) || t == Shard(1);
                    let at = tensor(&mesh, &[4, 6], 1)?.redistribute([x])?;
                    let direction = tensor(&mesh, &[4, 6], 2)?.redistribute([t])?;
                    world.trace().clear();
                    let (y, slope) = jvp(|x| Ok(vec![net.forward(&x[0])?]), &[&at], &[&direction])?;
                    // weights are constants: they have no gradients that would be reduced
                    let scattered = world.trace().records().iter().any(|record| record.call == "reduce_scatter");
                    assert!(!scattered || by_features, "{what}");
                    assert_close(&list(&y[0])?, &OUTPUT, &what);
                    assert_close(&list(&slope[0])?, &TANGENT, &what);
                    assert!(!y[0].has_gradient() && !slope[0].has_gradient());
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn several_inputs_and_outputs_have_tangents_in_every_layout() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let shape = [1, 2, 3, 4];
        for placement in [Replicate, Shard(1), Shard(2), Shard(3), Partial(ReduceOp::Sum)] {
            let of = |salt: usize| tensor(&mesh, &shape, salt)?.redistribute([placement.clone()]);
            let (primals, tangents) = ([of(1)?, of(2)?, of(3)?], [of(4)?, of(5)?, of(6)?]);
            let attend = |x: &[DTensor]| {
                let y = x[0].scaled_dot_product_attention(&x[1], &x[2], AttentionOptions::default())?;
                // the second depends on one input, the third on none
                Ok(vec![y, x[2].sum(&[-1], false)?, tensor(&mesh, &[2], 0)?])
            };
            let (_, found) = jvp(attend, &primals.each_ref(), &tangents.each_ref())?;
            let what = placement.to_string();
            assert_close(&list(&found[0])?, &ATTENTION, &what);
            assert_close(&list(&found[1])?, &list(&tangents[2].sum(&[-1], false)?)?, &what);
            assert_eq!(list(&found[2])?, [0.0, 0.0], "{what}");
        }
        Ok(())
    })
    .unwrap();
}

/// The derivative of every function along a direction, against the difference of two values, which is exact to the square of
/// the step.
#[test]
fn derivatives_are_the_differences_of_values() {
    type Function = fn(&DTensor) -> Result<DTensor>;
    let functions: [(&str, Function); 8] = [
        ("sort", |x| Ok(x.sort(-1, false)?.0)),
        ("amax", |x| x.amax(&[1], false)),
        ("cumsum", |x| x.exp()?.cumsum(0)),
        ("log_softmax", |x| x.log_softmax(-1)),
        ("gather", |x| x.square()?.narrow(0, 1, 2)?.flip(&[0])),
        ("matmul", |x| x.matmul(&x.t()?)?.sigmoid()),
        ("var", |x| x.var(&[1], 1.0, false)),
        ("where", |x| x.where_(&x.gt(0.1)?, 0.0)?.pow_scalar(3.0)),
    ];
    launch(2, move |world| {
        let mesh = world.mesh([("a", 2)])?;
        for (name, function) in functions {
            for placement in [Replicate, Shard(0), Shard(1)] {
                // no two numbers of a row are equal
                let x = tensor(&mesh, &[3, 5], 1)?.add(&tensor(&mesh, &[5], 2)?.mul_scalar(0.37)?)?;
                let (x, t) = (x.redistribute([placement.clone()])?, tensor(&mesh, &[3, 5], 8)?);
                let (_, found) = jvp(|x| Ok(vec![function(&x[0])?]), &[&x], &[&t])?;
                const STEP: f64 = 1e-5;
                let at = |factor: f64| function(&x.add(&t.mul_scalar(factor)?)?);
                let expected = at(STEP)?.sub(&at(-STEP)?)?.mul_scalar(0.5 / STEP)?;
                let (found, expected) = (list(&found[0])?, list(&expected)?);
                let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far < 1e-8, "{name} of {placement}: {far}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The cube, whose gradient is an operator without one.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Cube;

/// The gradient of [`Cube`]: `3 x^2 g`.
#[derive(Clone, PartialEq, Eq, Hash)]
struct CubeBackward;

impl Op for Cube {
    fn name(&self) -> &'static str {
        "cube"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        Ok(OpPlan { signature: Signature::pointwise(&[shape], shape), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].powf(3.0)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            Ok(vec![Some(op::apply(&CubeBackward, &[&saved.input(0), g])?.swap_remove(0))])
        })
    }
}

impl Op for CubeBackward {
    fn name(&self) -> &'static str {
        "cube"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        Ok(OpPlan { signature: Signature::pointwise(&[shape, shape], shape), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![(inputs[0].powf(2.0)? * 3.0)?.mul(&inputs[1])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

#[test]
fn an_operator_whose_gradient_is_not_differentiable_is_named() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = tensor(&mesh, &[2, 4, 8], 1)?;
        let again = |x: &[DTensor]| checkpoint_activations(&[&x[0]], |x| Ok(vec![x[0].exp()?]));
        let error = jvp(again, &[&x], &[&x]).unwrap_err();
        assert!(error.to_string().contains("checkpoint") && error.kind() == Some(&ErrorKind::Gradient), "{error}");
        let error = jvp(|x| op::apply(&Cube, &[&x[0]]), &[&x], &[&x]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the gradient of cube") && text.contains("jvp"), "{text}");
        assert_eq!(error.kind(), Some(&ErrorKind::Gradient));
        let twice = |x: &[DTensor]| Ok(jvp(|x| Ok(vec![x[0].exp()?]), &[&x[0]], &[&x[0]])?.1);
        let text = jvp(twice, &[&x], &[&x]).unwrap_err().to_string();
        assert!(text.contains("jvp inside the function of another jvp"), "{text}");
        // the operator itself has a gradient
        assert!(op::apply(&Cube, &[&x.requires_grad()])?[0].sum_all()?.backward().is_ok());
        world.barrier()
    })
    .unwrap();
}

#[test]
fn tangents_that_do_not_fit_are_refused() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = tensor(&mesh, &[4, 6], 1)?;
        let square = |x: &[DTensor]| Ok(vec![x[0].square()?]);
        let error =
            |primals: &[&DTensor], tangents: &[&DTensor]| jvp(square, primals, tangents).unwrap_err().to_string();
        assert!(error(&[&x], &[]).contains("1 primal(s) and 0 tangent(s)"));
        assert!(error(&[&x], &[&x.t()?]).contains("[6, 4]"));
        let whole = x.to_dtype(DType::I64)?;
        assert!(error(&[&whole], &[&whole]).contains("i64"));
        assert!(error(&[&x], &[&whole]).contains("floating-point numbers of the same shape"));
        let other = world.mesh([("b", 2)])?;
        assert!(error(&[&x], &[&tensor(&other, &[4, 6], 1)?]).contains("same mesh"));
        Ok(())
    })
    .unwrap();
}
