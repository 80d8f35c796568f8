//! When weights are gathered.

use shardwise::prelude::*;

use crate::fsdp::net::*;

#[test]
fn weights_are_gathered_for_every_use_unless_they_are_kept() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 8, DType::F64)?, reference(&world, 8, DType::F64)?);
        let parameters = net.named_parameters().len();
        let step = |step: usize| -> Result<(usize, usize, Gradients)> {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
            world.trace().clear();
            let loss = net.loss(&x, &target, false)?;
            let forward = count(&world, "all_gather");
            world.trace().clear();
            let gradients = loss.backward()?;
            Ok((forward, count(&world, "all_gather"), gradients))
        };
        let expect = |step: usize| -> Result<Gradients> {
            let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
            plain.loss(&x, &target, false)?.backward()
        };
        // gathered forward and again backward, where the gradient needs the weight: a bias it does not
        let (forward, backward, _) = step(0)?;
        assert!(forward <= parameters, "{forward}");
        assert!(backward > 0 && backward <= parameters, "{backward}");
        net.set_reshard_after_forward(false, &["dp"]);
        let (forward, backward, gradients) = step(0)?;
        assert_eq!((forward, backward), (parameters, 0));
        assert_same_gradients((&net, &gradients), (&plain, &expect(0)?), 1e-12, "kept")?;
        // kept for further micro-batches
        let (forward, backward, gradients) = step(1)?;
        assert_eq!((forward, backward), (0, 0));
        assert_same_gradients((&net, &gradients), (&plain, &expect(1)?), 1e-12, "second micro-batch")?;
        assert!(net.named_parameters().iter().all(|(_, param)| param.is_gathered()));
        // parameters and their gradients are sharded all the time
        assert_eq!(net.head.weight.get().placements(), [Shard(1)]);
        assert_eq!(gradients.get(&net.head.weight.get())?.placements(), [Shard(1)]);
        net.reshard();
        assert_eq!(step(0)?.0, parameters);
        net.reshard();
        // gathered ahead of time
        net.unshard()?;
        assert_eq!((step(0)?.0, step(1)?.1), (0, 0));
        // a step drops what was gathered
        let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
        for i in 0..3 {
            let (forward, backward, gradients) = step(i)?;
            assert!((forward == 0) == (i == 0) && backward == 0);
            ours.step(gradients)?;
            theirs.step(expect(i)?)?;
        }
        assert_same_parameters(&net, &plain, 1e-9, "trained")?;
        net.set_reshard_after_forward(true, &["dp"]);
        assert!(step(0)?.1 > 0);
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_kept_weight_stays_sharded_over_the_other_axes() {
    let run = |world: World| {
        let way = &WAYS[5];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 8, DType::F64)?, reference(&world, 8, DType::F64)?);
        net.set_reshard_after_forward(false, &["dp"]);
        let up = &net.blocks[0].up.weight;
        assert_eq!(up.get().placements(), [Shard(0), Shard(0)]);
        assert_eq!(up.forward_value()?.placements(), [Replicate, Shard(0)]);
        let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
        for step in 0..3 {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
            ours.step(net.loss(&x, &target, step == 2)?.backward()?)?;
            let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
            theirs.step(plain.loss(&x, &target, false)?.backward()?)?;
        }
        assert_same_parameters(&net, &plain, 1e-9, "FSDP x TP")?;
        net.set_reshard_after_forward(false, &["pp"]);
        let error = net.unshard().unwrap_err().to_string();
        assert!(error.contains("pp"), "{error}");
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn kept_weights_are_in_memory_and_resharded_ones_are_not() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 4)])?;
        let net = Net::new(&Builder::new(&mesh), 64, 2)?;
        shardwise::plan::fully_shard(&net, &mesh, &["dp"])?;
        let whole: usize = net.parameter_count() * 4;
        let before = world.memory().current();
        net.set_reshard_after_forward(false, &["dp"]);
        net.unshard()?;
        assert_eq!(world.memory().current() - before, whole);
        net.reshard();
        assert_eq!(world.memory().current(), before);
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_hook_around_the_gather_sends_another_form() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 8, DType::F32)?, reference(&world, 8, DType::F32)?);
        let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
        let weights: Vec<Param> =
            net.named_parameters().into_iter().map(|(_, param)| param).filter(|p| p.shape().len() == 2).collect();
        // values that bf16 represents exactly, so that the run equals the plain one
        for param in
            weights.iter().chain(plain.named_parameters().iter().map(|(_, p)| p).filter(|p| p.shape().len() == 2))
        {
            param.set(&param.get().detach().to_dtype(DType::BF16)?.to_dtype(DType::F32)?)?;
        }
        let mut sent = Vec::new();
        let mut found = Vec::new();
        for extended in [false, true] {
            for weight in &weights {
                let placements = weight.get().placements().to_vec();
                weight.keep_gathered(if extended { &[] } else { &["dp"] });
                if extended {
                    // two tensors on the wire: halves of the columns, in bf16
                    weight.on_use(move |shards| {
                        let dim = 1 - placements[0].shard_dim().unwrap_or(0);
                        let split = shards.shape()[dim] / 2;
                        let part = |start: usize, len: usize| {
                            let part = shards.narrow(dim as isize, start, len)?.to_dtype(DType::BF16)?;
                            part.redistribute([Replicate])?.to_dtype(DType::F32)
                        };
                        DTensor::cat(&[&part(0, split)?, &part(split, shards.shape()[dim] - split)?], dim as isize)
                    });
                }
            }
            world.trace().clear();
            let loss = net.loss(&x, &target, false)?;
            sent.push(bytes(&world, "all_gather"));
            found.push(loss.backward()?.in_param_layout()?);
        }
        assert!(sent[1] < sent[0] * 2 / 3, "{sent:?}");
        let (x, target) = batch(&one, &[Replicate], DType::F32, 0)?;
        let expected = plain.loss(&x, &target, false)?.backward()?;
        assert_same_gradients((&net, &found[0]), (&plain, &expected), 1e-6, "plain")?;
        // the gradient passes the bf16 of the wire: 8 bits
        assert_same_gradients((&net, &found[1]), (&plain, &expected), 1e-2, "extended")?;
        weights.iter().for_each(Param::clear_on_use);
        let again = net
            .loss(&batch(&mesh, &way.batch(), DType::F32, 0)?.0, &batch(&mesh, &way.batch(), DType::F32, 0)?.1, false)?
            .backward()?;
        assert_same_gradients((&net, &again), (&plain, &expected), 1e-6, "cleared")
    };
    launch(4, run).unwrap();
}
