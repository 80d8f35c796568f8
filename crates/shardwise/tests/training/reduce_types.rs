//! Types of reductions with mixed precision, under tensor parallelism, FSDP and both, with micro-batches: every gradient is the
//! exact one, rounded where its leaf says and nowhere else.

use half::{bf16, f16};
use shardwise::BackwardOptions;
use shardwise::nn::{Linear, MixedPrecision};
use shardwise::plan::{DataParallel, FullyShard, ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

use crate::fsdp::net::numbers;

const ROWS: usize = 479;
const MICRO_BATCHES: usize = 3;

/// Two products, whose gradients are sums of small integers: exact in every order of addition, and too large for a type of 8 or 11
/// bits.
#[derive(Module)]
struct Net {
    up: Linear,
    down: Linear,
}

const SIZES: [usize; 3] = [5, 8, 4];

/// The integers of the inputs, of both weights, and the gradient of the output.
fn input(micro_batch: usize) -> impl Fn(&[usize]) -> f64 + Send + Sync + 'static {
    move |i| ((i[0] * 7 + i[1] * 3 + i[0] * i[0] * (i[1] + micro_batch + 1)) % 5) as f64
}

fn weight(i: &[usize]) -> f64 {
    ((i[0] + 2 * i[1]) % 3) as f64
}

fn cotangent(i: &[usize]) -> f64 {
    ((i[0] + i[1]) % 3) as f64
}

impl Net {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let builder = Builder::new(mesh);
        let net = Net {
            up: Linear::without_bias(&builder.child("up"), SIZES[0], SIZES[1])?,
            down: Linear::without_bias(&builder.child("down"), SIZES[1], SIZES[2])?,
        };
        for param in [&net.up.weight, &net.down.weight] {
            let placed = vec![Replicate; mesh.ndim()];
            param.set(&DTensor::from_fn(param.shape(), DType::F32, mesh, placed, weight)?)?;
        }
        Ok(net)
    }

    fn backward(&self, batch: &[Placement], micro_batch: usize, options: BackwardOptions<'_>) -> Result<Gradients> {
        let mesh = self.up.weight.get().device_mesh().clone();
        let x = DTensor::from_fn((ROWS, SIZES[0]), DType::F32, &mesh, batch.to_vec(), input(micro_batch))?;
        let scale = DTensor::from_fn((ROWS, SIZES[2]), DType::F32, &mesh, batch.to_vec(), cotangent)?;
        let y = self.down.forward(&self.up.forward(&x)?)?;
        y.to_dtype(DType::F32)?.mul(&scale)?.sum_all()?.backward_with(options)
    }
}

/// The gradients of both weights for one micro-batch, added up in integers.
fn exact(micro_batch: usize) -> [Vec<f64>; 2] {
    let [inputs, width, outputs] = SIZES;
    let (mut up, mut down) = (vec![0.0; width * inputs], vec![0.0; outputs * width]);
    let input = input(micro_batch);
    for row in 0..ROWS {
        for feature in 0..width {
            let hidden: f64 = (0..inputs).map(|i| input(&[row, i]) * weight(&[feature, i])).sum();
            let arriving: f64 = (0..outputs).map(|o| cotangent(&[row, o]) * weight(&[o, feature])).sum();
            (0..inputs).for_each(|i| up[feature * inputs + i] += arriving * input(&[row, i]));
            (0..outputs).for_each(|o| down[o * width + feature] += cotangent(&[row, o]) * hidden);
        }
    }
    [up, down]
}

fn round(x: f64, dtype: Option<DType>) -> f64 {
    match dtype {
        Some(DType::BF16) => bf16::from_f64(x).to_f64(),
        Some(DType::F16) => f16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

/// A mesh, the axes that shard parameters and whether the batch is divided by an axis that replicates parameters.
struct Way {
    mesh: &'static str,
    shard: &'static [&'static str],
    replicate: &'static [&'static str],
}

const WAYS: [Way; 9] = [
    Way { mesh: "dp=1", shard: &[], replicate: &["dp"] },
    Way { mesh: "dp=4", shard: &["dp"], replicate: &[] },
    Way { mesh: "dp=3", shard: &["dp"], replicate: &[] },
    Way { mesh: "dp=4", shard: &[], replicate: &["dp"] },
    Way { mesh: "rep=2,dp=2", shard: &["dp"], replicate: &["rep"] },
    Way { mesh: "tp=2", shard: &[], replicate: &[] },
    Way { mesh: "tp=3", shard: &[], replicate: &[] },
    Way { mesh: "dp=2,tp=2", shard: &["dp"], replicate: &[] },
    Way { mesh: "rep=2,dp=2,tp=2", shard: &["dp"], replicate: &["rep"] },
];

impl Way {
    fn build(&self, mesh: &DeviceMesh) -> Result<Net> {
        let net = Net::new(mesh)?;
        let plan = match mesh.axis("tp").is_ok() {
            true => TensorParallel::new("tp").plan(&net, mesh)?,
            false => DataParallel::new(self.replicate).plan(&net, mesh)?,
        };
        let plan = if self.shard.is_empty() { plan } else { FullyShard::new(self.shard).extend(plan, &net, mesh)? };
        shard_module(&net, mesh, &plan)?;
        Ok(net)
    }

    /// Whether ranks have different rows, so that their gradients are terms of a sum.
    fn divides_rows(&self) -> bool {
        !self.shard.is_empty() || !self.replicate.is_empty()
    }

    /// The gradient after some micro-batches.
    fn expected(&self, policy: MixedPrecision, deferred: bool, exact: &[Vec<f64>]) -> Vec<f64> {
        let reduced = policy.reduce_dtype.or(policy.param_dtype);
        // The product of one rank that has all rows is rounded to the type that it is computed in; terms are not rounded.
        let computed = policy.param_dtype.filter(|_| !self.divides_rows());
        let elements = 0..exact[0].len();
        // Rounded when no rank holds terms any more: per micro-batch, or once for their sum.
        let is_late = !self.replicate.is_empty() || deferred && !self.shard.is_empty();
        let at = |i: usize| -> f64 {
            let each = exact.iter().map(|gradient| gradient[i]);
            match is_late {
                true => round(each.sum(), reduced),
                false => each.map(|x| round(round(x, computed), reduced)).fold(0.0, |sum, x| round(sum + x, None)),
            }
        };
        elements.map(at).collect()
    }
}

fn policies() -> Vec<MixedPrecision> {
    let types = [None, Some(DType::BF16), Some(DType::F16), Some(DType::F32)];
    let policy = |param_dtype, reduce_dtype| MixedPrecision { param_dtype, reduce_dtype, ..MixedPrecision::default() };
    types.iter().flat_map(|&param| types.iter().map(move |&reduce| policy(param, reduce))).collect()
}

#[test]
fn gradients_are_exact_up_to_the_rounding_that_was_asked_for() {
    let exact: Vec<[Vec<f64>; 2]> = (0..MICRO_BATCHES).map(exact).collect();
    let of = |param: usize, count: usize| exact[..count].iter().map(|both| both[param].clone()).collect::<Vec<_>>();
    // The test sees a rounding that is missing or repeated: none of the types has all bits, and two roundings differ from one.
    let has = |test: &dyn Fn(&[f64]) -> bool| {
        (0..exact[0][0].len())
            .any(|i| test(&of(0, MICRO_BATCHES).iter().map(|gradient| gradient[i]).collect::<Vec<_>>()))
    };
    for dtype in [Some(DType::BF16), Some(DType::F16)] {
        assert!(has(&|sums| sums.iter().all(|&x| round(x, dtype) != x)), "{dtype:?}");
        let each = |sums: &[f64]| sums.iter().map(|&x| round(x, dtype)).sum::<f64>();
        assert!(has(&|sums| round(each(sums), dtype) != each(sums)), "{dtype:?}");
    }

    for way in &WAYS {
        let expected: Vec<_> = [false, true]
            .iter()
            .flat_map(|&deferred| policies().into_iter().map(move |policy| (policy, deferred)))
            .map(|(policy, deferred)| {
                let of = |count| [0, 1].map(|param| way.expected(policy, deferred, &of(param, count)));
                (policy, deferred, [of(1), of(MICRO_BATCHES)])
            })
            .collect();
        let axes: Mesh = way.mesh.parse().unwrap();
        let size = axes.size();
        let run = move |world: World| {
            let mesh = world.device_mesh(axes.clone())?;
            let placed: Vec<Placement> =
                mesh.mesh().axes().iter().map(|axis| if axis.name == "tp" { Replicate } else { Shard(0) }).collect();
            let net = way.build(&mesh)?;
            for (policy, deferred, counts) in &expected {
                net.set_mixed_precision(Some(*policy))?;
                let options = BackwardOptions { defer_reduction: *deferred, ..BackwardOptions::default() };
                for (count, expected) in [1, MICRO_BATCHES].into_iter().zip(counts) {
                    let mut sum = net.backward(&placed, 0, options)?;
                    for micro_batch in 1..count {
                        sum = sum.accumulate(net.backward(&placed, micro_batch, options)?)?;
                    }
                    let sum = sum.in_param_layout()?;
                    for (param, expected) in [&net.up.weight, &net.down.weight].into_iter().zip(expected) {
                        let gradient = sum.get(&param.get())?;
                        assert_eq!(gradient.dtype(), DType::F32);
                        let what = format!("{}, {policy:?}, deferred: {deferred}, {count} micro-batches", way.mesh);
                        assert_eq!(numbers(&gradient.full_tensor()?), *expected, "{what}");
                    }
                }
            }
            Ok(())
        };
        ThreadWorld::new(size).unwrap().run(run).unwrap();
    }
}
