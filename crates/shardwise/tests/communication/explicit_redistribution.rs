//! Explicit redistribution: the communicated dtype, expected layouts, and scopes in which operators may not redistribute
//! implicitly.

use std::cell::RefCell;
use std::rc::Rc;

use shardwise::prelude::*;
use shardwise::tensor::{RedistributeOptions, check_expectations};
use shardwise::{ExplicitRedistribution, explicit_communication_only};

fn on(ranks: usize, run: impl Fn(World) -> Result<()> + Send + Sync + 'static) {
    ThreadWorld::new(ranks).unwrap().run(run).unwrap();
}

#[test]
fn elements_are_communicated_in_the_requested_dtype() {
    for ranks in 1..=3 {
        on(ranks, move |world| {
            let mesh = world.mesh([("dp", ranks)])?;
            let x = DTensor::randn((6, 4), &mesh, [Shard(0)])?.requires_grad();
            let options = RedistributeOptions { forward_dtype: Some(DType::BF16), backward_dtype: Some(DType::F64) };
            world.trace().clear();
            let y = x.redistribute_with([Replicate], options)?;
            assert_eq!((y.dtype(), y.placements()), (DType::BF16, &[Replicate][..]));
            assert!(y.equal(&x.detach().to_dtype(DType::BF16)?)?);
            if ranks > 1 {
                let sent: usize = world
                    .trace()
                    .records()
                    .iter()
                    .filter(|r| r.operator == Some("redistribute"))
                    .map(|r| r.bytes)
                    .sum();
                assert_eq!(sent, 24 / ranks * 2 * (ranks - 1), "{:?}", world.trace().records());
            }
            let found = y.to_dtype(DType::F32)?.square()?.sum_all()?.backward()?;
            let gradient = found.get(&x)?;
            assert_eq!(gradient.dtype(), DType::F32);
            let expected = (x.detach().to_dtype(DType::BF16)?.to_dtype(DType::F32)? * 2.0)?;
            assert!(gradient.allclose(&expected, 1e-2, 1e-2)?);
            // without types it is a plain redistribution, second derivatives included
            let plain = x.redistribute_with([Shard(1)], RedistributeOptions::default())?;
            assert_eq!((plain.dtype(), plain.placements()), (DType::F32, &[Shard(1)][..]));
            let first = plain.square()?.sum_all()?.backward_graph()?;
            let second = first.get(&x)?.sum_all()?.backward()?;
            assert_eq!(second.get(&x)?.full_tensor()?.to_vec2::<f32>()?[0], [2.0; 4]);
            Ok(())
        });
    }
}

#[test]
fn an_unexpected_layout_is_an_error() {
    on(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = DTensor::zeros((4, 6), DType::F32, &mesh, [Shard(0), Partial(ReduceOp::Sum)])?;
        for good in ["dp=S(0),tp=P(sum)", "tp=P(sum)", "dp = S(-2)", "S(0), P(sum)", ""] {
            x.expect(good)?;
        }
        let line = line!() + 1;
        let error = x.expect("dp=S(0),tp=R").unwrap_err().to_string();
        assert!(error.contains("found tp=P(sum)") && error.contains("needed tp=R"), "{error}");
        assert!(error.contains(&format!("explicit_redistribution.rs:{line}")), "{error}");
        assert!(x.expect("pp=R").unwrap_err().to_string().contains("correct the names"));
        assert!(x.expect("dp=Q").is_err());
        assert!(x.expect("dp=S(7)").is_err());
        world.barrier()?;
        // a setting of the whole process: no other test of this binary uses it
        check_expectations(false);
        world.barrier()?;
        let unchecked = x.expect("dp=R,pp=Q");
        world.barrier()?;
        check_expectations(true);
        unchecked?;
        Ok(())
    });
}

#[test]
fn an_implicit_redistribution_is_an_error_in_an_explicit_scope() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let x = DTensor::ones((4, 6), DType::F32, &mesh, [Shard(1)])?;
        let strict = ExplicitRedistribution::error();
        // explicit redistributions are allowed, and implicit ones that move nothing
        strict.run(|| x.t()?.redistribute([Replicate])?.matmul(&x)?.gelu())?;
        let line = line!() + 1;
        let error = strict.run(|| x.matmul(&x.t()?)?.exp()).unwrap_err();
        assert!(matches!(&error, Error::Implicit { operator: "exp", .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("from [4, 4] on tp=2: P(sum) to [4, 4] on tp=2: S(0)"), "{text}");
        assert!(text.contains(&format!("explicit_redistribution.rs:{line}")), "{text}");
        assert!(explicit_communication_only(|| x.matmul(&x.t()?)?.exp()).is_err());
        // the innermost scope applies, until it ends
        strict.run(|| ExplicitRedistribution::allow().run(|| x.matmul(&x.t()?)?.exp()))?;
        x.matmul(&x.t()?)?.exp()?;
        Ok(())
    });
}

#[test]
fn an_implicit_redistribution_is_reported_and_runs() {
    on(3, |world| {
        let mesh = world.mesh([("tp", 3)])?;
        let x = DTensor::ones((4, 6), DType::F64, &mesh, [Shard(1)])?;
        let found = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&found);
        let y = ExplicitRedistribution::warn_to(move |redistribution| seen.borrow_mut().push(redistribution.clone()))
            .run(|| x.matmul(&x.t()?)?.exp());
        assert_eq!(y?.full_tensor()?.to_vec2::<f64>()?[0], [6f64.exp(); 4]);
        let found = found.borrow();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].operator, "exp");
        let (from, to) = found[0].layouts.clone().expect("one tensor moved");
        assert_eq!((from.placements(), to.placements()), (&[Partial(ReduceOp::Sum)][..], &[Shard(0)][..]));
        assert!(found[0].call.site.contains("explicit_redistribution.rs"), "{}", found[0]);
        ExplicitRedistribution::warn().run(|| x.matmul(&x.t()?)?.exp())?;
        Ok(())
    });
}
