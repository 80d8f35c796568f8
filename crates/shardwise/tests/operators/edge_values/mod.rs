//! Elementwise operators on edge values (zeros, infinities, NaN, subnormals, largest numbers, integer limits) against
//! PyTorch's results (`record.py`), and arguments outside the range of an element type.

use std::collections::BTreeMap;

use candle_core::Tensor;
use serde::Deserialize;
use shardwise::ops::{Reduction, ops};
use shardwise::prelude::*;
use shardwise::tensor::{Arange, Linspace, Logspace};

#[derive(Deserialize, Clone)]
struct Family {
    single: Recorded,
    pairs: Recorded,
    unary: BTreeMap<String, Recorded>,
    binary: BTreeMap<String, Recorded>,
}

#[derive(Deserialize, Clone)]
struct Recorded {
    dtype: String,
    values: String,
}

/// A number as it is compared: integers and floating-point numbers apart.
#[derive(Debug, Clone, Copy)]
enum Value {
    Integer(i64),
    Real(f64),
}

impl Recorded {
    fn dtype(&self) -> DType {
        self.dtype.parse().expect("a type of candle")
    }

    /// The numbers, `None` where nothing is recorded.
    fn values(&self) -> Vec<Option<Value>> {
        let value = |text: &str| match (text, self.dtype.as_str()) {
            ("-", _) => None,
            ("nan", _) => Some(Value::Real(f64::NAN)),
            (bits, "f64") => Some(Value::Real(f64::from_bits(u64::from_str_radix(bits, 16).expect("bits")))),
            (bits, "f32") => Some(Value::Real(f32::from_bits(u32::from_str_radix(bits, 16).expect("bits")).into())),
            (number, _) => Some(Value::Integer(number.parse().expect("an integer"))),
        };
        self.values.split(' ').map(value).collect()
    }
}

fn tensor(values: &[Value], dtype: DType) -> Result<Tensor> {
    let integers = values.iter().map(|v| match v {
        Value::Integer(n) => *n,
        Value::Real(_) => 0,
    });
    let reals = values.iter().map(|v| match v {
        Value::Integer(_) => 0.0,
        Value::Real(x) => *x,
    });
    Ok(match dtype.is_float() {
        true => {
            Tensor::from_vec(reals.collect::<Vec<_>>(), values.len(), &candle_core::Device::Cpu)?.to_dtype(dtype)?
        }
        false => {
            Tensor::from_vec(integers.collect::<Vec<_>>(), values.len(), &candle_core::Device::Cpu)?.to_dtype(dtype)?
        }
    })
}

fn values(tensor: &Tensor) -> Result<Vec<Value>> {
    Ok(match tensor.dtype().is_float() {
        true => tensor.to_dtype(DType::F64)?.to_vec1::<f64>()?.into_iter().map(Value::Real).collect(),
        false => tensor.to_dtype(DType::I64)?.to_vec1::<i64>()?.into_iter().map(Value::Integer).collect(),
    })
}

/// Whether two numbers are equal, zeros with their signs; functions that are not exact in any library may differ by a
/// few units of the last digit.
fn same(got: Value, expected: Value, tolerance: f64) -> bool {
    match (got, expected) {
        (Value::Integer(a), Value::Integer(b)) => a == b,
        (Value::Real(a), Value::Real(b)) if b.is_nan() => a.is_nan(),
        (Value::Real(a), Value::Real(b)) if b == 0.0 || b.is_infinite() => a.to_bits() == b.to_bits(),
        (Value::Real(a), Value::Real(b)) => (a - b).abs() <= tolerance * b.abs(),
        _ => false,
    }
}

/// Operators that IEEE 754 or integer arithmetic defines to the last bit.
const EXACT: &[&str] = &[
    "neg",
    "abs",
    "sign",
    "square",
    "relu",
    "floor",
    "ceil",
    "round",
    "trunc",
    "frac",
    "reciprocal",
    "isnan",
    "isfinite",
    "isinf",
    "signbit",
    "logical_not",
    "clamp",
    "add_scalar",
    "sub_scalar",
    "rsub_scalar",
    "mul_scalar",
    "div_scalar",
    "nan_to_num",
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fmod",
    "remainder",
    "div_floor",
    "div_trunc",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
];

/// Whether PyTorch is off by more than rounding, and the exact result is wanted instead.
fn is_off(op: &str, inputs: &[Value], got: Value, expected: Value) -> bool {
    let real = |value: Value| match value {
        Value::Real(x) => x,
        Value::Integer(n) => n as f64,
    };
    let (got, expected, x) = (real(got), real(expected), real(inputs[0]));
    match op {
        // Its vectors give NaN where the quotient has too many digits. What C's fmod gives, and Rust's %, is exact.
        "fmod" => expected.is_nan() && got == x % real(inputs[1]),
        "remainder" => {
            expected.is_nan() && (got == x % real(inputs[1]) || got == x % real(inputs[1]) + real(inputs[1]))
        }
        // It subtracts numbers near 1, flushes small results to zero, or loses the sign of zero.
        "gelu" | "gelu_tanh" | "sigmoid" | "silu" | "mish" | "logsigmoid" | "log1p" => (got - expected).abs() < 1e-7,
        // It rounds integers to f32 before.
        "sin" | "cos" | "tan" => matches!(inputs[0], Value::Integer(n) if n.unsigned_abs() > 1 << 24),
        // It computes 1 + |x| in the type of the integer.
        "softsign" => matches!(inputs[0], Value::Integer(_)) && got == f64::from((x / (1.0 + x.abs())) as f32),
        // x * 6 overflows before it is divided by 6.
        "hardswish" => expected.is_infinite() && got == x,
        _ => false,
    }
}

/// Applies an operator of the table to tensors that two ranks share.
fn apply(op: &str, inputs: &[Tensor], mesh: &DeviceMesh) -> Result<Tensor> {
    let entry = ops().find(|entry| entry.name == op).unwrap_or_else(|| panic!("no operator {op}"));
    let shared = |t: &Tensor| DTensor::distribute_tensor(t, mesh, [Shard(0)], None);
    let inputs = inputs.iter().map(shared).collect::<Result<Vec<_>>>()?;
    (entry.apply)(&inputs)?[0].full_tensor()
}

#[test]
fn edge_values_give_the_results_of_pytorch() {
    let families: Vec<Family> = serde_json::from_str(include_str!("vectors.json")).expect("the recorded vectors");
    let failures = launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let (mut failures, mut compared) = (Vec::new(), 0);
        for family in &families {
            let dtype = family.single.dtype();
            let single: Vec<Value> = family.single.values().into_iter().flatten().collect();
            let values_of_pairs: Vec<Value> = family.pairs.values().into_iter().flatten().collect();
            let n = values_of_pairs.len();
            let left: Vec<Value> = (0..n * n).map(|i| values_of_pairs[i / n]).collect();
            let right: Vec<Value> = (0..n * n).map(|i| values_of_pairs[i % n]).collect();
            let one: Vec<Vec<Value>> = vec![single];
            let two = vec![left, right];
            let cases = family.unary.iter().map(|c| (c, &one)).chain(family.binary.iter().map(|c| (c, &two)));
            for ((op, expected), inputs) in cases {
                let wanted = expected.values();
                let kept = |column: &Vec<Value>| -> Vec<Value> {
                    column.iter().zip(&wanted).filter(|(_, w)| w.is_some()).map(|(v, _)| *v).collect()
                };
                let columns: Vec<Vec<Value>> = inputs.iter().map(kept).collect();
                let tensors = columns.iter().map(|c| tensor(c, dtype)).collect::<Result<Vec<_>>>()?;
                let result = apply(op, &tensors, &mesh)?;
                let wanted: Vec<Value> = wanted.into_iter().flatten().collect();
                if result.dtype() != expected.dtype() {
                    failures.push(format!("{op} of {dtype:?}: {:?} and not {:?}", result.dtype(), expected.dtype()));
                    continue;
                }
                // Integers that become f32 are rounded before the function in one library and after it in the other.
                let exact = EXACT.contains(&op.as_str()) && dtype.is_float() == result.dtype().is_float();
                let unit = if result.dtype() == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() };
                let tolerance = if exact { 0.0 } else { 8.0 * unit };
                for (i, (got, wanted)) in values(&result)?.into_iter().zip(wanted).enumerate() {
                    let arguments: Vec<Value> = columns.iter().map(|c| c[i]).collect();
                    compared += 1;
                    if !same(got, wanted, tolerance) && !is_off(op, &arguments, got, wanted) {
                        failures.push(format!("{op} of {dtype:?} {arguments:?}: {got:?} and not {wanted:?}"));
                    }
                }
            }
        }
        if world.rank() == 0 {
            println!("{compared} results compared");
            failures.iter().for_each(|f| println!("{f}"));
            assert!(failures.is_empty(), "{} of {compared} results differ", failures.len());
        }
        Ok(())
    });
    failures.expect("every result is PyTorch's");
}

/// Runs a program on two ranks and returns the result of the first.
fn on_two<T: Send + 'static>(program: impl Fn(&World, &DeviceMesh) -> Result<T> + Send + Sync + 'static) -> Result<T> {
    let world = ThreadWorld::new(2)?;
    Ok(world.run(move |world| program(&world, &world.mesh([("dp", 2)])?))?.swap_remove(0))
}

fn refused<T: std::fmt::Debug + Send + 'static>(
    what: &str,
    program: impl Fn(&World, &DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> String {
    on_two(program).expect_err(what).to_string()
}

fn i64s(values: &[i64], mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::distribute_tensor(&Tensor::new(values, &candle_core::Device::Cpu)?, mesh, [Shard(0)], None)
}

#[test]
fn integers_are_exact_beyond_53_bits() {
    on_two(|_, mesh| {
        let big = (1i64 << 53) + 1;
        let range = DTensor::arange(Arange::new(big, big + 5, 2), DType::I64, mesh, [Shard(0)])?;
        assert_eq!(range.full_tensor()?.to_vec1::<i64>()?, [big, big + 2, big + 4]);
        let down = DTensor::arange(Arange::new(i64::MAX, i64::MAX - 5, -2), DType::I64, mesh, [Shard(0)])?;
        assert_eq!(down.full_tensor()?.to_vec1::<i64>()?, [i64::MAX, i64::MAX - 2, i64::MAX - 4]);
        assert_eq!(
            DTensor::arange(Arange::new(0, 5, 1.5), DType::I64, mesh, [Shard(0)])?.full_tensor()?.to_vec1::<i64>()?,
            [0, 1, 2, 3]
        );
        assert_eq!(DTensor::full(big, 2, DType::I64, mesh, [Shard(0)])?.full_tensor()?.to_vec1::<i64>()?, [big; 2]);
        let x = i64s(&[3, 5], mesh)?;
        let of = |t: DTensor| t.full_tensor()?.to_vec1::<i64>().map_err(Error::from);
        let n = (1i64 << 60) + 1;
        assert_eq!(of(x.add_scalar(n)?)?, [n + 3, n + 5]);
        assert_eq!(of(x.sub_scalar(n)?)?, [3 - n, 5 - n]);
        assert_eq!(of(x.rsub_scalar(n)?)?, [n - 3, n - 5]);
        assert_eq!(of(x.mul_scalar(n)?)?, [3 * n, 5 * n]);
        assert_eq!(of(x.pow_scalar(((1u64 << 33) + 1) as f64)?)?[0], 3i64.wrapping_mul(4982619357117939713));
        assert_eq!(of(x.masked_fill(&x.ge(&x)?, n)?)?, [n, n]);
        assert_eq!(of(x.pad(&[(1, 0)], n)?)?, [n, 3, 5]);
        assert_eq!(of(x.full_like(n)?)?, [n, n]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn scalars_outside_the_range_of_a_dtype_are_rejected() {
    for (value, dtype, fits) in [
        (300.0, DType::U8, None),
        (-1.0, DType::U8, Some(255)), // as PyTorch
        (-1.7, DType::U8, None),
        (255.5, DType::U8, Some(255)),
        (f64::NAN, DType::U8, None),
        (f64::NAN, DType::I64, None),
        (f64::INFINITY, DType::I32, None),
        (40000.0, DType::I16, None),
        (-32768.0, DType::I16, Some(-32768)),
        (9.3e18, DType::I64, None),
        (-1.0, DType::I16, Some(-1)),
    ] {
        let full = on_two(move |_, mesh| {
            let x = DTensor::full(value, 3, dtype, mesh, [Shard(0)])?;
            let whole = x.full_tensor()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
            assert_eq!(whole, vec![whole[0]; 3]);
            Ok(whole[0])
        });
        match fits {
            Some(expected) => assert_eq!(full.unwrap(), expected, "{value} in {dtype:?}"),
            None => {
                let text = full.expect_err("a number that does not fit").to_string();
                assert!(text.contains(dtype.as_str()), "{text}");
            }
        }
    }
    let bytes = |mesh: &DeviceMesh| DTensor::zeros(4, DType::U8, mesh, [Shard(0)]);
    refused("full_like", move |_, mesh| bytes(mesh)?.full_like(256));
    refused("masked_fill", move |_, mesh| bytes(mesh)?.masked_fill(&bytes(mesh)?.logical_not()?, f64::NAN));
    refused("pad", move |_, mesh| bytes(mesh)?.pad(&[(1, 1)], 300.0));
    refused("clamp from above", move |_, mesh| bytes(mesh)?.clamp(Some(300.0), None));
    refused("clamp from below", move |_, mesh| bytes(mesh)?.clamp(None, Some(-5.0)));
    refused("from_fn", |_, mesh| DTensor::from_fn(4, DType::I16, mesh, [Shard(0)], |_| f64::NAN));
    refused("linspace", |_, mesh| {
        DTensor::linspace(Linspace { start: 0.0, end: 300.0, steps: 4 }, DType::U8, mesh, [Shard(0)])
    });
    on_two(move |_, mesh| {
        let clamped = bytes(mesh)?.add_scalar(200)?.clamp(Some(-5.0), Some(1000.0))?;
        assert_eq!(clamped.full_tensor()?.to_vec1::<u8>()?, [200; 4]);
        let wrapped = DTensor::arange(254..258, DType::U8, mesh, [Shard(0)])?;
        assert_eq!(wrapped.full_tensor()?.to_vec1::<u8>()?, [254, 255, 0, 1]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn integers_divided_by_zero_are_an_error() {
    type Divide = fn(&DTensor, &DTensor) -> Result<DTensor>;
    let all: [(&str, Divide); 4] = [
        ("div_floor", |a, b| a.div_floor(b)),
        ("div_trunc", |a, b| a.div_trunc(b)),
        ("fmod", |a, b| a.fmod(b)),
        ("remainder", |a, b| a.remainder(b)),
    ];
    for (name, divide) in all {
        // The zero is on the second rank; the first gets the error by communication.
        let text = refused(name, move |_, mesh| {
            divide(&i64s(&[5, 6, 7, 8], mesh)?, &i64s(&[1, 2, 3, 0], mesh)?)?.full_tensor()
        });
        assert!(text.contains(name) && text.contains("0"), "{text}");
        let none = on_two(move |_, mesh| {
            let nothing = DTensor::zeros(0, DType::I64, mesh, [Shard(0)])?;
            divide(&nothing, &DTensor::zeros(1, DType::I64, mesh, [Replicate])?)?.full_tensor()
        });
        assert_eq!(none.unwrap().dims(), [0], "nothing is divided");
    }
    let real = on_two(|_, mesh| i64s(&[5, -5], mesh)?.div(&i64s(&[0, 0], mesh)?)?.full_tensor()).unwrap();
    assert_eq!(real.to_vec1::<f32>().unwrap(), [f32::INFINITY, f32::NEG_INFINITY]);
}

#[test]
fn one_hot_takes_any_integer_type_and_only_its_classes() {
    on_two(|_, mesh| {
        let ids = DTensor::distribute_tensor(
            &Tensor::new(&[0u8, 44, 255], &candle_core::Device::Cpu)?,
            mesh,
            [Shard(0)],
            None,
        )?;
        let hot = ids.one_hot(300)?.full_tensor()?;
        assert_eq!((hot.dims(), hot.dtype()), (&[3, 300][..], DType::I64));
        let sums = hot.sum(1)?.to_vec1::<i64>()?;
        assert_eq!(sums, [1, 1, 1]);
        let rows = hot.to_vec2::<i64>()?;
        assert_eq!((rows[0][0], rows[1][44], rows[2][255]), (1, 1, 1));
        Ok(())
    })
    .unwrap();
    for bad in [-1, 3] {
        let text =
            refused("an id that is not a class", move |_, mesh| i64s(&[0, bad], mesh)?.one_hot(3)?.full_tensor());
        assert!(text.contains("one_hot") && text.contains(&bad.to_string()), "{text}");
    }
}

#[test]
fn empty_tensors_sum_to_zero_and_have_an_empty_softmax() {
    on_two(|_, mesh| {
        for placement in [Shard(0), Replicate] {
            let empty = DTensor::zeros(0, DType::F32, mesh, [placement.clone()])?;
            for sum in [empty.sum_all()?, empty.cumsum(0)?.sum_all()?, DTensor::einsum("i->", &[&empty])?] {
                assert_eq!(sum.full_tensor()?.to_scalar::<f32>()?.to_bits(), 0);
            }
            assert!(empty.mean(&[], false)?.full_tensor()?.to_scalar::<f32>()?.is_nan());
            let zeros = DTensor::full(-0.0, 4, DType::F32, mesh, [placement])?;
            assert_eq!(zeros.sum_all()?.full_tensor()?.to_scalar::<f32>()?.to_bits(), 0); // as PyTorch
        }
        for (shape, dim) in [([2, 0], 1), ([0, 2], 0), ([2, 0], 0), ([0, 2], 1)] {
            for placement in [Shard(0), Shard(1), Replicate] {
                let x = DTensor::zeros(&shape, DType::F32, mesh, [placement])?;
                for y in [x.softmax(dim)?, x.log_softmax(dim)?] {
                    assert_eq!(y.full_tensor()?.dims(), shape);
                }
                let sums = x.logsumexp(&[dim], false)?.full_tensor()?.to_vec1::<f32>()?;
                assert!(sums.iter().all(|s| *s == f32::NEG_INFINITY), "{sums:?}");
                assert_eq!(sums.len(), shape[1 - dim as usize]);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn kl_div_batchmean_divides_by_the_batch_size() {
    // torch.nn.functional.kl_div([[.1, .2], [.3, .4]].log(), [[.5, .5], [.2, .8]], reduction="batchmean")
    let expected = [0.5f64 / 0.1, 0.5 / 0.2, 0.2 / 0.3, 0.8 / 0.4];
    let expected: f64 =
        expected.iter().zip([0.5, 0.5, 0.2, 0.8]).map(|(ratio, p)| p * f64::ln(*ratio)).sum::<f64>() / 2.0;
    for placement in [Shard(0), Shard(1), Replicate] {
        let got = on_two(move |_, mesh| {
            let of = |values: [f64; 4]| -> Result<DTensor> {
                let whole = Tensor::from_vec(values.to_vec(), (2, 2), &candle_core::Device::Cpu)?;
                DTensor::distribute_tensor(&whole, mesh, [placement.clone()], None)
            };
            let (x, y) = (of([0.1, 0.2, 0.3, 0.4])?.log()?, of([0.5, 0.5, 0.2, 0.8])?);
            x.kl_div(&y, Reduction::BatchMean)?.full_tensor()?.to_scalar::<f64>().map_err(Error::from)
        });
        assert!((got.unwrap() - expected).abs() < 1e-15);
    }
    let other = refused("mse_loss", |_, mesh| {
        let x = DTensor::zeros((2, 2), DType::F64, mesh, [Shard(0)])?;
        x.mse_loss(&x, Reduction::BatchMean)
    });
    assert!(other.contains("BatchMean"), "{other}");
}

#[test]
fn arguments_at_their_borders_give_the_results_of_pytorch() {
    let found = on_two(|_, mesh| {
        let of = |values: &[f64]| -> Result<DTensor> {
            DTensor::distribute_tensor(&Tensor::new(values, &candle_core::Device::Cpu)?, mesh, [Shard(0)], None)
        };
        let list = |x: DTensor| -> Result<Vec<f64>> { Ok(x.full_tensor()?.to_dtype(DType::F64)?.to_vec1()?) };
        // A degree is truncated towards zero.
        let degrees = of(&[-0.5, -1.0, 1.9])?;
        let polynomials = list(of(&[3.0, 3.0, 3.0])?.special_chebyshev_polynomial_t(&degrees)?)?;
        // Bounds in the wrong order: the lower one is compared first.
        let logit = list(of(&[0.2, 0.9])?.logit(Some(0.6))?)?;
        let powers = Logspace { start: 4.3, end: 1.2, steps: 2, base: 10.0 };
        let powers = list(DTensor::logspace(powers, DType::I64, mesh, [Shard(0)])?)?;
        let x = of(&[f64::NAN, -1.0, 0.0, 2.0])?.requires_grad();
        let gradient = list(x.relu()?.sum_all()?.backward()?.get(&x)?.clone())?;
        // One row without a dimension of its own has the shape of its target.
        let margins = of(&[1.0, 2.0, 4.0])?.multi_margin_loss(&i64s(&[1], mesh)?, 1.0, 1.0, None, Reduction::None)?;
        Ok((polynomials, logit, powers, gradient, (margins.shape().to_vec(), list(margins)?)))
    });
    let (polynomials, logit, powers, gradient, margins) = found.unwrap();
    assert_eq!(polynomials, [1.0, 0.0, 3.0]);
    assert!((logit[0] - 1.5f64.ln()).abs() < 1e-15 && (logit[1] + 1.5f64.ln()).abs() < 1e-15, "{logit:?}");
    assert_eq!((powers, gradient), (vec![10_000.0, 10.0], vec![1.0, 0.0, 0.0, 1.0]));
    assert_eq!(margins, (vec![1], vec![1.0]));
}
