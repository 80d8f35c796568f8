//! Fused attention against the same attention composed of other operators, in every layout; what it communicates; caches,
//! dropout, second derivatives and dry runs. A mask with a gradient is what makes attention take the composed form.

use shardwise::nn::{AttentionConfig, Builder, Forward, Module, MultiHeadAttention};
use shardwise::ops::AttentionOptions;
use shardwise::prelude::*;
use shardwise::{BackwardOptions, DryWorld};

/// Queries, keys and values: batch, query heads, key heads, queries, keys, size.
const SIZES: [(usize, usize, usize, usize, usize, usize); 3] =
    [(2, 4, 4, 6, 6, 4), (2, 6, 2, 5, 9, 3), (1, 3, 3, 70, 140, 8)];

fn filled(
    shape: (usize, usize, usize, usize),
    phase: f64,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<DTensor> {
    let value = move |i: &[usize]| {
        let at = i.iter().fold(phase, |sum, &i| 7.31 * sum + i as f64);
        (at * 12.9898).sin() * 1.5
    };
    DTensor::from_fn(shape, DType::F64, mesh, placements.to_vec(), value)
}

fn operands(
    (batch, heads, key_heads, queries, keys, size): (usize, usize, usize, usize, usize, usize),
    mesh: &DeviceMesh,
    placements: [&[Placement]; 3],
) -> Result<[DTensor; 3]> {
    let key_shape = (batch, key_heads, keys, size);
    Ok([
        filled((batch, heads, queries, size), 0.1, mesh, placements[0])?.requires_grad(),
        filled(key_shape, 0.2, mesh, placements[1])?.requires_grad(),
        filled(key_shape, 0.3, mesh, placements[2])?.requires_grad(),
    ])
}

/// All options that change what is computed, with `queries` and `keys` of a size.
fn all_options(queries: usize, keys: usize) -> Vec<AttentionOptions<'static>> {
    let plain = AttentionOptions::default();
    let offset = keys as isize - queries as isize;
    vec![
        plain,
        AttentionOptions { causal: true, ..plain },
        AttentionOptions { causal: true, query_offset: offset, window: Some(2), ..plain },
        // the first queries see nothing
        AttentionOptions { causal: true, query_offset: -2, ..plain },
        AttentionOptions { window: Some(1), soft_cap: Some(0.8), scale: Some(1.3), ..plain },
        AttentionOptions { dropout: 0.3, causal: true, soft_cap: Some(3.0), ..plain },
    ]
}

/// The two outputs and the three gradients, as full tensors.
fn computed(operands: &[DTensor; 3], options: AttentionOptions<'_>) -> Result<Vec<Vec<f64>>> {
    let [q, k, v] = operands;
    q.device_mesh().manual_seed(5);
    let (result, logsumexp) = q.attention_with_logsumexp(k, v, options)?;
    let finite = logsumexp.nan_to_num(0.0, 0.0, 0.0)?;
    let weight = |t: &DTensor| t.mul(&t.detach().sin()?)?.sum_all();
    let gradients = weight(&result)?.add(&weight(&finite)?)?.backward()?;
    let mut found = vec![result, finite];
    for operand in operands {
        found.push(gradients.get(operand)?.clone());
    }
    found.iter().map(|t| Ok(t.full_tensor()?.flatten_all()?.to_vec1::<f64>()?)).collect()
}

fn assert_close(found: &[Vec<f64>], expected: &[Vec<f64>], text: &str) {
    for (which, (found, expected)) in ["result", "logsumexp", "dq", "dk", "dv"].iter().zip(found.iter().zip(expected)) {
        assert_eq!(found.len(), expected.len());
        for (x, y) in found.iter().zip(expected) {
            assert!((x - y).abs() <= 1e-10 * (1.0 + y.abs()), "{which}: {x} and not {y}: {text}");
        }
    }
}

#[test]
fn the_fused_and_the_composed_form_agree_in_every_layout() {
    let layouts: [[&[Placement]; 3]; 7] = [
        [&[Replicate, Replicate], &[Replicate, Replicate], &[Replicate, Replicate]],
        [&[Shard(0), Shard(1)], &[Shard(0), Shard(1)], &[Shard(0), Shard(1)]],
        // queries, and the keys of other ranks
        [&[Shard(2), Replicate], &[Replicate, Replicate], &[Replicate, Shard(3)]],
        [&[Replicate, Replicate], &[Shard(2), Replicate], &[Shard(2), Replicate]],
        [&[Replicate, Shard(2)], &[Shard(2), Shard(2)], &[Shard(2), Shard(2)]],
        [&[Shard(1), Replicate], &[Replicate, Shard(2)], &[Replicate, Shard(2)]],
        [&[Shard(3), Replicate], &[Replicate, Partial(ReduceOp::Sum)], &[Replicate, Replicate]],
    ];
    let run = move |world: World| {
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for sizes in SIZES {
            let whole = operands(sizes, &alone, [&[Replicate]; 3])?;
            for options in all_options(sizes.3, sizes.4) {
                // A mask that changes nothing, except that it has a gradient.
                let mask = DTensor::zeros((sizes.3, sizes.4), DType::F64, &alone, [Replicate])?.requires_grad();
                let expected = computed(&whole, AttentionOptions { mask: Some(&mask), ..options })?;
                assert_close(&computed(&whole, options)?, &expected, &format!("{sizes:?} {options:?}"));
                for placements in layouts {
                    let sharded = operands(sizes, &mesh, placements)?;
                    let text = format!("{sizes:?} {options:?} {placements:?}");
                    assert_close(&computed(&sharded, options)?, &expected, &text);
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn masks_broadcast_and_booleans_hide_keys() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        for (sizes, axis) in [(SIZES[0], 2), (SIZES[1], 1), (SIZES[1], 2)] {
            let (batch, heads, _, queries, keys, _) = sizes;
            let whole = operands(sizes, &mesh, [&[Replicate]; 3])?;
            let sharded = operands(sizes, &mesh, [&[Replicate], &[Shard(axis)], &[Shard(axis)]])?;
            for shape in
                [(1, 1, 1, keys), (batch, 1, queries, keys), (1, heads, queries, 1), (batch, heads, queries, keys)]
            {
                let added = filled(shape, 0.7, &mesh, &[Replicate])?;
                let seen = added.gt(-0.5)?;
                let hidden = added.gt(-0.5)?.eq(0.0)?;
                let infinite = added.mul_scalar(0.0)?.masked_fill(&hidden, f64::NEG_INFINITY)?;
                for (mask, composed) in [(&added, &added), (&seen, &infinite)] {
                    let with = |mask| AttentionOptions { mask: Some(mask), ..AttentionOptions::default() };
                    let leaf = composed.requires_grad();
                    let expected = computed(&whole, with(&leaf))?;
                    let text = format!("mask {shape:?} of {sizes:?}");
                    assert_close(&computed(&whole, with(mask))?, &expected, &text);
                    assert_close(&computed(&sharded, with(mask))?, &expected, &text);
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn sharded_keys_are_never_gathered() {
    launch(4, |world| {
        let mesh = world.mesh([("context", 4)])?;
        let (keys, size) = (64, 16);
        let operands = operands((1, 2, 2, 8, keys, size), &mesh, [&[Replicate], &[Shard(2)], &[Shard(2)]])?;
        let [q, k, v] = &operands;
        world.trace().clear();
        let causal = AttentionOptions { causal: true, query_offset: 56, ..AttentionOptions::default() };
        let result = q.scaled_dot_product_attention(k, v, causal)?;
        assert_eq!(result.placements(), [Partial(ReduceOp::Sum)]);
        let gradients = result.backward_from(&result.ones_like()?.redistribute([Replicate])?)?;
        let calls: Vec<&str> = world.trace().records().iter().map(|r| r.call).filter(|c| *c != "agree").collect();
        assert!(!calls.is_empty() && calls.iter().all(|call| *call == "all_reduce"), "{calls:?}");
        // Statistics of 16 queries, forward and backward; the result and the gradient of the queries stay partial.
        let bytes: usize = world.trace().records().iter().map(|r| r.bytes).sum();
        assert!(bytes < 2 * keys * size * 8 / 4, "{bytes} bytes are as many as the keys of a rank");
        assert_eq!(gradients.get(k)?.placements(), [Shard(2)]);
        assert_eq!(gradients.get(v)?.placements(), [Shard(2)]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn queries_after_a_cache_give_the_last_rows() {
    launch(1, |world| {
        let mesh = world.mesh([("one", 1)])?;
        let [q, k, v] = operands((2, 4, 2, 9, 9, 4), &mesh, [&[Replicate]; 3])?;
        let whole = q.scaled_dot_product_attention(&k, &v, AttentionOptions { causal: true, ..Default::default() })?;
        let options = AttentionOptions { causal: true, query_offset: 7, ..AttentionOptions::default() };
        let last = q.narrow(2, 7, 2)?.scaled_dot_product_attention(&k, &v, options)?;
        assert!(last.allclose(&whole.narrow(2, 7, 2)?, 1e-12, 1e-12)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn second_derivatives_are_those_of_the_composed_form() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let sizes = (1, 4, 2, 3, 5, 2);
        let options =
            AttentionOptions { causal: true, query_offset: 2, soft_cap: Some(1.5), dropout: 0.2, ..Default::default() };
        let second = |operands: &[DTensor; 3], options: AttentionOptions<'_>| -> Result<Vec<Vec<f64>>> {
            mesh.manual_seed(3);
            let [q, k, v] = operands;
            let loss = q.scaled_dot_product_attention(k, v, options)?.square()?.sum_all()?;
            let first = loss.backward_with(BackwardOptions { create_graph: true, ..Default::default() })?;
            let again = first.get(q)?.square()?.sum_all()?.add(&first.get(k)?.square()?.sum_all()?)?.backward()?;
            operands.iter().map(|t| Ok(again.get(t)?.full_tensor()?.flatten_all()?.to_vec1::<f64>()?)).collect()
        };
        let mask = DTensor::zeros((3, 5), DType::F64, &mesh, [Replicate])?.requires_grad();
        let whole = operands(sizes, &mesh, [&[Replicate]; 3])?;
        let expected = second(&whole, AttentionOptions { mask: Some(&mask), ..options })?;
        for axis in [1, 2] {
            let sharded = operands(sizes, &mesh, [&[Replicate], &[Shard(axis)], &[Shard(axis)]])?;
            let found = second(&sharded, options)?;
            for (x, y) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((x - y).abs() <= 1e-9 * (1.0 + y.abs()), "{x} and not {y}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn half_precision_is_rounded_once() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let exact = operands((1, 2, 2, 20, 200, 16), &mesh, [&[Replicate]; 3])?;
        for (dtype, bound) in [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
            for placement in [Replicate, Shard(2)] {
                let [q, k, v] = [&exact[0], &exact[1], &exact[2]].map(|t| t.detach().to_dtype(dtype));
                let (q, k, v) = (q?, k?.redistribute([placement.clone()])?, v?.redistribute([placement.clone()])?);
                let wide = |t: &DTensor| t.redistribute([Replicate])?.to_dtype(DType::F64);
                let options = AttentionOptions { causal: true, query_offset: 180, ..Default::default() };
                let expected = wide(&q)?.scaled_dot_product_attention(&wide(&k)?, &wide(&v)?, options)?;
                let found = q.scaled_dot_product_attention(&k, &v, options)?;
                assert_eq!(found.dtype(), dtype);
                let largest = expected.abs()?.amax(&[], false)?.item::<f64>()?;
                let error = wide(&found)?.sub(&expected)?.abs()?.amax(&[], false)?.item::<f64>()?;
                // half a unit in the last place of the largest element
                assert!(
                    error <= 1.001 * bound * largest.log2().floor().exp2(),
                    "{dtype:?} {placement:?}: {error} of {largest}"
                );
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn dry_runs_have_the_layouts_and_count_the_products() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("cp", 2)])?;
        let split = [Shard(0), Shard(2)];
        let [q, k, v] = operands((2, 4, 2, 8, 8, 4), &mesh, [&[Shard(0), Replicate], &split, &split])?;
        let options = AttentionOptions { causal: true, dropout: 0.1, ..AttentionOptions::default() };
        let result = q.rotary_embedding(100.0, 0)?.scaled_dot_product_attention(&k, &v, options)?;
        let gradients = result.sum_all()?.backward()?;
        Ok((result.placements().to_vec(), gradients.get(&k)?.placements().to_vec()))
    };
    let dry = DryWorld::new(4).unwrap().run(program).unwrap();
    let real = ThreadWorld::new(4).unwrap().run(program).unwrap();
    assert_eq!(dry.value, real[0]);
}

#[test]
fn wrong_options_are_errors() {
    launch(1, |world| {
        let mesh = world.mesh([("one", 1)])?;
        let [q, k, v] = operands((1, 2, 2, 3, 4, 2), &mesh, [&[Replicate]; 3])?;
        let plain = AttentionOptions::default();
        let narrow = DTensor::zeros((3, 3), DType::F64, &mesh, [Replicate])?;
        let integers = DTensor::zeros((3, 4), DType::I64, &mesh, [Replicate])?;
        for (options, word) in [
            (AttentionOptions { dropout: 1.0, ..plain }, "below 1"),
            (AttentionOptions { soft_cap: Some(0.0), ..plain }, "soft cap"),
            (AttentionOptions { mask: Some(&narrow), ..plain }, "broadcast"),
            (AttentionOptions { mask: Some(&integers), ..plain }, "u8"),
        ] {
            let error = q.scaled_dot_product_attention(&k, &v, options).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("scaled_dot_product_attention"), "{error}");
        }
        let counts = k.to_dtype(DType::I64)?;
        let error = counts.scaled_dot_product_attention(&counts, &counts, plain).unwrap_err().to_string();
        assert!(error.contains("floating-point"), "{error}");
        let promoted = q.scaled_dot_product_attention(&k.to_dtype(DType::F32)?, &v, plain)?;
        assert_eq!(promoted.dtype(), DType::F64);
        Ok(())
    })
    .unwrap();
}

#[test]
fn rotary_embedding_turns_pairs_by_their_positions() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let (length, size, base, first) = (5, 6, 50.0, 3);
        for placement in [Replicate, Shard(1), Shard(2), Shard(3), Partial(ReduceOp::Sum)] {
            let x = filled((1, 2, length, size), 0.4, &mesh, &[Replicate])?;
            let turned = x.redistribute([placement])?.requires_grad();
            let y = turned.rotary_embedding(base, first)?;
            let gradient = y.backward_from(&x)?.get(&turned)?.clone();
            let angle = |row: usize, pair: usize| (first + row) as f64 * base.powf(-2.0 * pair as f64 / size as f64);
            let value = |t: &DTensor| Ok::<_, Error>(t.full_tensor()?.flatten_all()?.to_vec1::<f64>()?);
            let (x, y, gradient) = (value(&x)?, value(&y)?, value(&gradient)?);
            for row in 0..2 * length {
                for pair in 0..size / 2 {
                    let (sin, cos) = angle(row % length, pair).sin_cos();
                    let (i, j) = (row * size + pair, row * size + size / 2 + pair);
                    let close =
                        |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found} {expected}");
                    close(y[i], x[i] * cos - x[j] * sin);
                    close(y[j], x[j] * cos + x[i] * sin);
                    // the gradient turns back
                    close(gradient[i], x[i] * cos + x[j] * sin);
                    close(gradient[j], x[j] * cos - x[i] * sin);
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_layer_passes_its_window_cap_and_dropout_to_the_operator() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let config = AttentionConfig {
            width: 12,
            heads: 4,
            key_heads: 2,
            causal: true,
            window: Some(3),
            soft_cap: Some(0.7),
            dropout: 0.4,
            ..AttentionConfig::default()
        };
        let layer = MultiHeadAttention::new(&Builder::new(&mesh), config)?;
        let x = DTensor::randn((2, 9, 12), &mesh, [Shard(0)])?;
        let by_hand = |dropout: f64| {
            let heads = |t: DTensor, heads: isize| t.unflatten(-1, &[heads, -1])?.transpose(1, 2);
            let options = AttentionOptions {
                causal: true,
                window: Some(3),
                soft_cap: Some(0.7),
                dropout,
                ..AttentionOptions::default()
            };
            let (keys, values) = (heads(layer.key.forward(&x)?, 2)?, heads(layer.value.forward(&x)?, 2)?);
            let mixed = heads(layer.query.forward(&x)?, 4)?.scaled_dot_product_attention(&keys, &values, options)?;
            layer.output.forward(&mixed.transpose(1, 2)?.flatten(-2, -1)?)
        };
        let numbers = |t: DTensor| t.full_tensor()?.flatten_all()?.to_vec1::<f32>().map_err(Error::from);
        let drawn = |of: &dyn Fn() -> Result<DTensor>| {
            mesh.manual_seed(3);
            numbers(of()?)
        };
        let trained = drawn(&|| layer.forward(&x))?;
        assert_eq!(trained, drawn(&|| by_hand(0.4))?);
        layer.eval();
        let evaluated = numbers(layer.forward(&x)?)?;
        assert_eq!(evaluated, numbers(by_hand(0.0)?)?);
        assert_ne!(trained, evaluated);
        let plain = AttentionConfig { window: None, soft_cap: None, ..config };
        let other = MultiHeadAttention::new(&Builder::new(&mesh), plain)?;
        for ((_, from), (_, to)) in layer.named_parameters().iter().zip(other.named_parameters()) {
            to.set(&from.get().detach())?;
        }
        other.eval();
        assert_ne!(evaluated, numbers(other.forward(&x)?)?);
        for wrong in [AttentionConfig { dropout: 1.0, ..config }, AttentionConfig { soft_cap: Some(0.0), ..config }] {
            let error = MultiHeadAttention::new(&Builder::new(&mesh), wrong).err().expect("refused").to_string();
            assert!(error.contains("soft cap above 0"), "{error}");
        }
        Ok(())
    };
    launch(2, run).unwrap();
}
