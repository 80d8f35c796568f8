//! Custom operators, and rules that override those of built-in operators.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candle_core::Tensor;
use shardwise::error::ErrorKind;
use shardwise::op::{self, Gradient, KernelContext, Op, OpPlan, cache_report};
use shardwise::ops::override_rule;
use shardwise::prelude::*;
use shardwise::rule::{Decision, DimSharding, RuleCall, Signature};
use shardwise::tensor::SaveForBackward;
use shardwise::{DryWorld, explicit_communication_only};

fn matrix(mesh: &DeviceMesh, rows: usize, columns: usize, placement: Placement) -> Result<DTensor> {
    DTensor::from_fn((rows, columns), DType::F64, mesh, [placement], |i| ((i[0] * 7 + i[1] * 3) as f64).sin())
}

/// A matrix product sharded on the columns of its right factor, whatever the inputs are.
fn by_columns(call: &RuleCall<'_>) -> Result<Option<Decision>> {
    let RuleCall { inputs, outputs, .. } = call;
    let mesh = inputs[0].mesh();
    let left = Layout::replicated(mesh, inputs[0].shape())?;
    let right = Layout::new(mesh, inputs[1].shape(), [Shard(1)])?;
    let output = Layout::new(mesh, outputs[0].shape.as_slice(), [Shard(1)])?;
    Ok(Some(Decision::new([left, right], [output])))
}

#[test]
fn a_rule_override_applies_inside_its_scope_only() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let (a, b) = (matrix(&mesh, 4, 3, Shard(0))?.requires_grad(), matrix(&mesh, 3, 5, Replicate)?.requires_grad());
        let own = a.matmul(&b)?;
        assert_eq!(own.placements(), [Shard(0)]);
        let expected = own.sum_all()?.backward()?;
        let called = Rc::new(Cell::new(0));
        let counter = Rc::clone(&called);
        let rule = move |call: &RuleCall<'_>| {
            counter.set(counter.get() + 1);
            by_columns(call)
        };
        override_rule(&mesh, "matmul", rule, || {
            let before = cache_report();
            for _ in 0..3 {
                let y = a.matmul(&b)?;
                assert_eq!(y.placements(), [Shard(1)]);
                assert!(y.allclose(&own, 1e-12, 1e-12)?);
                let found = y.sum_all()?.backward()?;
                for leaf in [&a, &b] {
                    assert!(found.get(leaf)?.allclose(expected.get(leaf)?, 1e-12, 1e-12)?);
                }
            }
            assert!(cache_report().hits > before.hits, "decisions of the rule are kept");
            assert_eq!(called.get(), 1, "and asked for once");
            // other operators keep their rules
            assert_eq!(a.exp()?.placements(), [Shard(0)]);
            // the innermost rule applies, and may leave the decision to the operator
            override_rule(
                &mesh,
                "matmul",
                |_| Ok(None),
                || {
                    assert_eq!(a.matmul(&b)?.placements(), [Shard(0)]);
                    Ok(())
                },
            )?;
            assert_eq!(a.matmul(&b)?.placements(), [Shard(1)]);
            Ok(())
        })?;
        assert_eq!(a.matmul(&b)?.placements(), [Shard(0)], "no decision of the rule is left");
        assert_eq!(called.get(), 1);
        // after an error and a panic too
        let failed: Result<()> = override_rule(&mesh, "matmul", by_columns, || Err(Error::other("stop")));
        assert!(failed.unwrap_err().to_string().contains("stop"));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            override_rule(&mesh, "matmul", by_columns, || -> Result<()> { std::panic::resume_unwind(Box::new(1)) })
        }));
        assert!(panicked.is_err());
        assert_eq!(a.matmul(&b)?.placements(), [Shard(0)]);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(program).unwrap();
}

#[test]
fn invalid_rules_are_rejected_on_every_rank() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let x = matrix(&mesh, 4, 4, Replicate)?;
        let refused = |name: &str| override_rule(&mesh, name, |_| Ok(None), || Ok(())).unwrap_err().to_string();
        let message = refused("matmull");
        assert!(message.contains("`matmull`") && message.contains("`matmul`"), "{message}");
        // a composed operator names its parts: no rule is silently ignored
        let message = refused("linear");
        assert!(message.contains("has no rule itself") && message.contains("einsum"), "{message}");
        let rule = |call: &RuleCall<'_>| Ok(Some(Decision::new([call.inputs[0].clone()], [])));
        let message = override_rule(&mesh, "exp", rule, || x.exp()).unwrap_err().to_string();
        assert!(message.contains("a rule for exp") && message.contains("[4, 4]"), "{message}");
        // ranks with different rules, or only some with one
        let other = |_: &RuleCall<'_>| Ok(None);
        let different = match world.rank() {
            0 => override_rule(&mesh, "exp", by_columns, || Ok(())),
            _ => override_rule(&mesh, "exp", other, || Ok(())),
        };
        assert!(different.unwrap_err().to_string().contains("operator and rule"));
        let message = match world.rank() {
            0 => override_rule(&mesh, "exp", other, || Ok(())).unwrap_err().to_string(),
            _ => world.barrier().unwrap_err().to_string(),
        };
        assert!(message.contains("operator and rule") && message.contains("barrier"), "{message}");
        // a mesh of ranks that did not agree on the rule does not follow it
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let whole = |call: &RuleCall<'_>| {
            let cut = Layout::new(call.inputs[0].mesh(), call.inputs[0].shape(), [Shard(0)])?;
            Ok(Some(Decision::new([cut.clone()], [cut])))
        };
        override_rule(&alone, "exp", whole, || {
            assert_eq!(x.exp()?.placements(), [Replicate]);
            assert_eq!(matrix(&alone, 4, 4, Replicate)?.exp()?.placements(), [Shard(0)]);
            Ok(())
        })
    };
    ThreadWorld::new(2).unwrap().run(program).unwrap();
}

/// How often kernels of [`Energy`] ran.
static RUNS: AtomicUsize = AtomicUsize::new(0);

/// The sum of squares of every row, times an integer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Energy {
    times: u32,
    broken: bool,
}

impl Op for Energy {
    fn name(&self) -> &'static str {
        "energy"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let [x] = inputs else { unreachable!("one input") };
        if x.shape.len() != 2 {
            return Err(ErrorKind::Argument.error("operands", format!("{:?}", x.shape), "a matrix", "reshape it"));
        }
        let outputs = vec![TensorMeta::new(x.shape[0], x.dtype)];
        Ok(OpPlan { signature: Signature::reduction(2, &[1], false, DimSharding::Reduces(ReduceOp::Sum)), outputs })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        RUNS.fetch_add(1, SeqCst);
        assert_eq!(context.local_shape(0), [inputs[0].dims()[0]]);
        assert_eq!(context.output_indices(0, 0).len(), inputs[0].dims()[0]);
        assert_eq!(context.input_shape(0).len(), 2);
        let sums = (inputs[0].sqr()?.sum(1)? * f64::from(self.times))?;
        Ok(vec![if self.broken { sums.unsqueeze(0)? } else { sums }])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let slope = saved.input(0).mul_scalar(2.0 * f64::from(op.times))?;
            Ok(vec![gradients[0].as_ref().map(|g| g.unsqueeze(1)?.mul(&slope)).transpose()?])
        })
    }
}

#[test]
fn a_custom_operator_is_sharded_by_its_rule_and_has_a_gradient() {
    let program = |world: World| {
        let mesh = world.mesh([("tp", 4)])?;
        let energy = Energy { times: 3, broken: false };
        for (placement, output) in [(Shard(0), Shard(0)), (Shard(1), Partial(ReduceOp::Sum)), (Replicate, Replicate)] {
            let x = matrix(&mesh, 5, 6, placement)?.requires_grad(); // 2, 2, 1 and no rows
            let y = explicit_communication_only(|| op::apply(&energy, &[&x]))?.swap_remove(0);
            assert_eq!(y.placements(), [output]);
            let expected = x.square()?.sum(&[1], false)?.mul_scalar(3.0)?;
            assert!(y.allclose(&expected, 1e-12, 1e-12)?);
            let (found, right) = (y.square()?.sum_all()?.backward()?, expected.square()?.sum_all()?.backward()?);
            assert!(found.get(&x)?.allclose(right.get(&x)?, 1e-12, 1e-12)?);
        }
        assert!(RUNS.load(SeqCst) >= 3);
        // its arguments are part of what is cached
        let x = matrix(&mesh, 4, 2, Shard(0))?;
        let ratio = op::apply(&Energy { times: 1, broken: false }, &[&x])?[0].div(&op::apply(&energy, &[&x])?[0])?;
        assert!(ratio.allclose(&ratio.full_like(1.0 / 3.0)?, 1e-12, 1e-12)?);
        // errors name the operator, its tensors and the line of the program
        let message = op::apply(&energy, &[&x.select(0, 0)?]).unwrap_err().to_string();
        assert!(["energy", "a matrix", "custom_rules.rs"].iter().all(|part| message.contains(part)), "{message}");
        assert!(op::apply(&energy, &[]).unwrap_err().to_string().contains("at least one tensor"));
        let broken = op::apply(&Energy { times: 1, broken: true }, &[&x]).unwrap_err().to_string();
        assert!(broken.contains("[1, 1]") && broken.contains("correct the kernel"), "{broken}");
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn a_dry_run_counts_the_work_of_a_rank() {
    let flops = |placement: Placement| {
        let ran = DryWorld::new(4).unwrap().run(move |world| {
            let mesh = world.mesh([("tp", 4)])?;
            let a = DTensor::zeros((8, 16), DType::F32, &mesh, [placement])?;
            a.matmul(&DTensor::zeros((16, 32), DType::F32, &mesh, [Replicate])?)?.exp()
        });
        ran.unwrap().flops
    };
    assert_eq!(flops(Replicate), 2 * 8 * 16 * 32 + 8 * 32);
    assert_eq!(flops(Shard(0)), (2 * 8 * 16 * 32 + 8 * 32) / 4);
    let ran = DryWorld::new(64).unwrap().run(|world| {
        let mesh = world.mesh([("tp", 64)])?;
        let y = op::apply(&Energy { times: 1, broken: true }, &[&matrix(&mesh, 128, 8, Shard(1))?])?;
        Ok(y[0].placements().to_vec())
    });
    // no kernel runs: the result of this one would be refused
    assert_eq!(ran.unwrap().value, [Partial(ReduceOp::Sum)]);
}
