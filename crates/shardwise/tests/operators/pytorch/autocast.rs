//! `autocast` compared with PyTorch's, and in every layout.
//!
//! Values recorded from PyTorch 2.15, `torch.autocast("cpu", dtype=torch.bfloat16)`.

use shardwise::nn::Linear;
use shardwise::ops::{AttentionOptions, ConvOptions, LossOptions, Reduction};
use shardwise::prelude::*;
use shardwise::{autocast, checkpoint_activations};
use shardwise_test_suites::counting::counted;

use crate::pytorch::{list, on};

/// Elements that f32 and mostly bf16 hold exactly.
fn exact(mesh: &DeviceMesh, shape: &[usize], by: [usize; 2], divisor: f64, placement: Placement) -> Result<DTensor> {
    DTensor::from_fn(shape, DType::F32, mesh, [placement], |index| {
        let flat = index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i);
        (((flat * by[0] + by[1]) % 23) as f64 - 11.0) / divisor
    })
}

/// Two linear layers with GELU and a layer norm between them, a residual, and the cross entropy.
struct Network {
    x: DTensor,
    target: DTensor,
    /// Weight and bias, scale of the norm, weight and bias.
    params: [DTensor; 5],
}

/// What a pass of [`Network`] returns: first product, second product, loss.
type Results = [DTensor; 3];

impl Network {
    fn new(mesh: &DeviceMesh, rows: Placement, first: Placement, second: Placement) -> Result<Self> {
        let bias = if first == Shard(0) { Shard(0) } else { Replicate };
        let classes = [1.0, 0.0, 7.0, 3.0, 2.0, 5.0];
        let target = DTensor::from_fn(6, DType::I64, mesh, [rows.clone()], |index| classes[index[0]])?;
        let params = [
            exact(mesh, &[12, 8], [5, 1], 16.0, first)?,
            exact(mesh, &[12], [3, 2], 32.0, bias)?,
            exact(mesh, &[12], [3, 5], 16.0, Replicate)?,
            exact(mesh, &[8, 12], [11, 4], 16.0, second)?,
            exact(mesh, &[8], [9, 2], 32.0, Replicate)?,
        ];
        let params = params.map(|param| param.requires_grad());
        Ok(Network { x: exact(mesh, &[6, 8], [7, 3], 8.0, rows)?, target, params })
    }

    fn run(&self) -> Result<Results> {
        let [w1, b1, scale, w2, b2] = &self.params;
        let first = self.x.linear(w1, Some(b1))?;
        let second = first.gelu()?.layer_norm(1, Some(scale), None, 1e-5)?.linear(w2, Some(b2))?;
        let loss = second.add(&self.x)?.cross_entropy(&self.target, LossOptions::default())?;
        Ok([first, second, loss])
    }
}

/// Differences of at most so many steps of bf16 of the largest expected number.
fn assert_steps(found: &[f64], expected: &[f64], steps: f64, what: &str) {
    let largest = expected.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    let worst = found.iter().zip(expected).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= steps * largest / 256.0, "{what}: {worst}\n{found:?}\n{expected:?}");
}

#[rustfmt::skip]
const FIRST: [f64; 24] = [
    -0.828125, -1.171875, 2.078125, -0.2421875, -0.40625, -0.9296875, 2.5, -0.5390625, -2.140625, -1.2265625, 1.3046875, -0.1171875,
    0.4453125, -0.953125, -1.09375, -0.3359375, 0.78125, 1.0, -0.7578125, -0.71875, 0.7578125, 0.6171875, -0.2421875, -0.3828125,
];
#[rustfmt::skip]
const SECOND: [f64; 16] = [
    0.65625, -0.5625, 0.1914062, 0.2519531, 1.359375, -0.7851562, 0.3964844, 0.75,
    -0.4414062, -0.022583, -0.8125, 0.2832031, -0.6796875, -0.4433594, -0.609375, 0.5820312,
];
const LOSS: f64 = 2.749377;
/// The first elements of the gradient of every parameter.
const GRADIENTS: [&[f64]; 5] = [
    &[
        -0.0108032, -0.0358887, 0.0495605, -0.0327148, -0.0189209, 0.0668945, -0.0196533, -0.0019836, -0.0649414,
        0.0751953, -0.0529785, -0.0654297, 0.0908203, 0.0424805, -0.052002, 0.1069336,
    ],
    &[-0.0678711, -0.0629883, -0.1088867, 0.0092163, 0.1113281, 0.0167236, 0.1738281, -0.0771484],
    &[0.2070312, 0.1121826, -0.4501953, -0.1300049, 0.2978516, -0.112793, -0.65625, -0.1748047],
    &[0.0532227, -0.0291748, 0.0, 0.0201416, -0.1044922, -0.1787109, -0.2255859, -0.0429688, 0.0512695],
    &[-0.0561523, -0.0595703, -0.0380859, -0.045166, 0.1542969, -0.0849609, 0.1542969, -0.0241699],
];

#[test]
fn a_network_has_pytorchs_types_and_numbers_in_every_layout() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let layouts = [
            (Replicate, Replicate, Replicate),
            (Shard(0), Replicate, Replicate),
            (Replicate, Shard(0), Shard(1)),
            (Shard(0), Shard(0), Shard(0)),
        ];
        for (rows, first, second) in layouts {
            let what = format!("{rows}, {first}, {second}");
            let network = Network::new(&mesh, rows, first, second)?;
            let [product, output, loss] = autocast(DType::BF16, || network.run())?;
            assert_eq!([&product, &output, &loss].map(DTensor::dtype), [DType::BF16, DType::BF16, DType::F32]);
            // Sums of these products are exact in f32, so the first product is rounded once, like PyTorch's.
            assert_eq!(list(&product)?[..24], FIRST, "{what}");
            assert_steps(&list(&output)?[..16], &SECOND, 2.0, &what);
            // In f32 the loss is 2.74847. Logits are rounded in steps of up to 1 / 128, of which a loss is the mean of six.
            let tolerance = if network.x.placements() == [Replicate] { 3e-4 } else { 2e-3 };
            assert!((loss.detach().item::<f32>()? - LOSS as f32).abs() < tolerance, "{what}: {loss}");
            assert!((network.run()?[2].item::<f32>()? - 2.748_467_7).abs() < 1e-5);
            // Outside of the scope: the backward pass has the types of the forward pass.
            let gradients = loss.backward()?.in_param_layout()?;
            for (param, expected) in network.params.iter().zip(GRADIENTS) {
                let gradient = gradients.get(param)?;
                assert_eq!((gradient.dtype(), gradient.placements()), (DType::F32, param.placements()));
                assert_steps(&list(gradient)?[..expected.len()], expected, 4.0, &what);
            }
        }
        Ok(())
    });
}

#[test]
fn products_convert_and_all_else_computes_in_its_types() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = &exact(&mesh, &[4, 4], [7, 3], 8.0, Shard(0))?;
        let (v, b) = (&exact(&mesh, &[4], [5, 1], 8.0, Replicate)?, &exact(&mesh, &[2, 4, 4], [3, 2], 8.0, Shard(0))?);
        let (kernel, plane) =
            (&exact(&mesh, &[3, 4, 3], [5, 2], 8.0, Replicate)?, &exact(&mesh, &[2, 4, 9], [3, 2], 8.0, Shard(0))?);
        let (half, double) = (&x.to_dtype(DType::F16)?, &x.to_dtype(DType::F64)?);
        let products = || -> Result<Vec<DTensor>> {
            Ok(vec![
                x.matmul(x)?,
                x.mm(x)?,
                b.bmm(b)?,
                x.matmul(v)?,
                DTensor::einsum("ij,jk->ki", &[x, x])?,
                x.linear(x, None)?,
                x.linear(x, Some(v))?,
                x.matmul(x)?.linear(x, Some(v))?,
                x.linear_activation(x, Some(v), shardwise::ops::Activation::Gelu)?,
                x.addmm(x, x, 1.0, 1.0)?,
                b.baddbmm(b, b, 1.0, 1.0)?,
                plane.conv1d(kernel, None, ConvOptions::default())?,
                plane.conv1d(kernel, Some(&v.narrow(0, 0, 3)?), ConvOptions::default())?,
                b.scaled_dot_product_attention(b, b, AttentionOptions::default())?,
                half.matmul(x)?,
            ])
        };
        let others = || -> Result<Vec<DTensor>> {
            let y = x.matmul(x)?;
            Ok(vec![
                x.mv(v)?,
                v.dot(v)?,
                v.outer(v)?,
                x.softmax(-1)?,
                x.sum_all()?,
                y.add(x)?,
                y.mse_loss(&y, Reduction::Mean)?,
                y.layer_norm(1, Some(v), None, 1e-5)?,
                x.fft_irfft(None, -1, Default::default())?,
            ])
        };
        for dtype in [DType::BF16, DType::F16] {
            for (i, y) in autocast(dtype, products)?.iter().enumerate() {
                assert_eq!(y.dtype(), dtype, "product {i}");
            }
            for (i, y) in autocast(dtype, others)?.iter().enumerate() {
                assert_eq!(y.dtype(), DType::F32, "operator {i}");
            }
            // f64 is never rounded, and an inner scope turns it off.
            let inside = || Ok([double.matmul(x)?, autocast(DType::F32, || x.matmul(x))?]);
            assert_eq!(autocast(dtype, inside)?.each_ref().map(DTensor::dtype), [DType::F64, DType::F32]);
        }
        // The values are those of operands that a program converts.
        let low = x.to_dtype(DType::BF16)?;
        assert!(autocast(DType::BF16, || x.matmul(x))?.equal(&low.matmul(&low)?)?);
        assert_eq!(x.matmul(x)?.dtype(), DType::F32);
        let message = autocast(DType::F64, || Ok(())).unwrap_err().to_string();
        assert!(message.contains("f64") && message.contains("bf16 or f16"), "{message}");
        // A scope ends with an error inside of it, too.
        assert!(autocast(DType::BF16, || x.matmul(&v.narrow(0, 0, 3)?)).is_err());
        assert_eq!(x.matmul(x)?.dtype(), DType::F32);
        Ok(())
    });
}

#[test]
fn operands_move_in_the_lower_type_and_gradients_of_sharded_weights_are_reduce_scattered() {
    on(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = exact(&mesh, &[64, 8], [7, 3], 8.0, Shard(0))?;
        let w = exact(&mesh, &[12, 8], [5, 1], 16.0, Shard(0))?.requires_grad();
        let bytes = || world.trace().records().iter().map(|record| record.bytes).sum::<usize>();
        world.trace().clear();
        x.linear(&w.detach(), None)?;
        let full = bytes();
        world.trace().clear();
        let y = autocast(DType::BF16, || x.linear(&w, None))?;
        assert_eq!((bytes() * 2, y.placements()), (full, &[Shard(0)][..]));
        let (gradients, calls) =
            counted(&world, || y.to_dtype(DType::F32)?.square()?.sum_all()?.backward()?.in_param_layout())?;
        assert_eq!(calls, ["reduce_scatter"]);
        assert_eq!((gradients.get(&w)?.dtype(), gradients.get(&w)?.placements()), (DType::F32, &[Shard(0)][..]));
        Ok(())
    });
}

#[test]
fn a_module_is_cast_as_a_whole_or_by_autocast_and_recomputation_casts_again() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let x = exact(&mesh, &[6, 8], [7, 3], 8.0, Replicate)?;
        let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 8, 12)?;
        assert_eq!(autocast(DType::BF16, || layer.forward(&x))?.dtype(), DType::BF16);
        assert_eq!(layer.weight.dtype(), DType::F32);
        // Recomputed in the backward pass, outside of the scope, in the same types: the same gradient.
        let w = layer.weight.get();
        let inner = w.clone();
        let again = autocast(DType::BF16, || {
            checkpoint_activations(&[&x], move |x| Ok(vec![x[0].linear(&inner, None)?.gelu()?]))
        })?;
        let once = autocast(DType::BF16, || x.linear(&w, None)?.gelu())?;
        let gradient = |y: &DTensor| -> Result<DTensor> {
            assert_eq!(y.dtype(), DType::BF16);
            Ok(y.to_dtype(DType::F32)?.square()?.sum_all()?.backward()?.get(&w)?.clone())
        };
        assert!(gradient(&again[0])?.equal(&gradient(&once)?)?);
        layer.to_dtype(DType::BF16)?;
        assert_eq!(
            (layer.weight.dtype(), layer.forward(&x.to_dtype(DType::BF16)?)?.dtype()),
            (DType::BF16, DType::BF16)
        );
        Ok(())
    });
}
