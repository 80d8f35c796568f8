//! Quantized weights in memory: products and lookups in every layout are those of the expanded weight.

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::nn::{Embedding, Forward, Linear};
use shardwise::param::Param;
use shardwise::prelude::*;
use shardwise_kernels::quantized::{BlockType, dequantize};

/// Blocks `[rows, blocks, bytes]` of Q8_0 or Q4_1 with small scales.
fn blocks(seed: u64, rows: usize, count: usize, block: BlockType) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bytes: Vec<u8> = (0..rows * count * block.bytes()).map(|_| rng.random()).collect();
    for one in bytes.chunks_mut(block.bytes()) {
        // The half floats from 2^-10 to 2^-7.
        one[..2].copy_from_slice(&rng.random_range(0x1400u16..0x2000).to_le_bytes());
        if block == BlockType::Q4_1 {
            one[2..4].copy_from_slice(&rng.random_range(0x9400u16..0xa000).to_le_bytes());
        }
    }
    Tensor::from_vec(bytes, (rows, count, block.bytes()), &Device::Cpu).unwrap()
}

fn expanded(blocks: &Tensor) -> Tensor {
    dequantize(blocks).unwrap().flatten(1, 2).unwrap()
}

fn inputs(rows: usize, features: usize) -> Tensor {
    let values: Vec<f32> = (0..rows * features).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    Tensor::from_vec(values, (rows, features), &Device::Cpu).unwrap()
}

fn close(found: &Tensor, expected: &Tensor, label: &str) {
    let error =
        (found - expected).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    assert!(error < 2e-4, "{label}: {error}");
}

/// Placements of the weight and of the input on one axis, also ones that do not fit each other.
#[test]
fn products_are_those_of_the_expanded_weight_in_every_layout() {
    for ranks in [1, 2, 3] {
        launch(ranks, move |world| {
            let mesh = world.mesh([("tp", ranks)])?;
            for (seed, block) in [BlockType::Q8_0, BlockType::Q4_1].into_iter().enumerate() {
                let weight = blocks(seed as u64, 10, 6, block);
                let (x, bias) = (inputs(3, 192), inputs(1, 10).squeeze(0)?);
                let expected = x.matmul(&expanded(&weight).t()?)?.broadcast_add(&bias)?;
                let mut sizes = vec![1; ranks];
                sizes[0] = 7 - ranks;
                let ragged = Placement::ragged(1, sizes.clone());
                let of_features = Placement::ragged(1, sizes.iter().map(|n| n * 32).collect::<Vec<_>>());
                for of_weight in [Replicate, Shard(0), Shard(1), ragged] {
                    for of_x in [Replicate, Shard(0), Shard(1), of_features.clone()] {
                        let weight = DTensor::distribute_tensor(&weight, &mesh, [of_weight.clone()], None)?;
                        let x = DTensor::distribute_tensor(&x, &mesh, [of_x.clone()], None)?;
                        let bias = DTensor::distribute_tensor(&bias, &mesh, [Replicate], None)?;
                        let found = x.quantized_linear(&weight, Some(&bias))?;
                        close(&found.full_tensor()?, &expected, &format!("{ranks} ranks, {of_weight} and {of_x}"));
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Row-parallel layers stay local: blocks and features are sharded at the same places.
#[test]
fn sharded_layers_compute_without_communication() {
    launch(3, |world| {
        let mesh = world.mesh([("tp", 3)])?;
        let (up, down) = (blocks(1, 192, 2, BlockType::Q4_1), blocks(2, 8, 6, BlockType::Q8_0));
        let x = inputs(2, 64);
        let expected = x.matmul(&expanded(&up).t()?)?.matmul(&expanded(&down).t()?)?;
        let place = |t: &Tensor, p: Placement| DTensor::distribute_tensor(t, &mesh, [p], None);
        // 3, 2 and 1 blocks of 32 features.
        let up = place(&up, Placement::ragged(0, vec![96, 64, 32]))?;
        let down = place(&down, Placement::ragged(1, vec![3, 2, 1]))?;
        let x = place(&x, Replicate)?;
        let y =
            shardwise::explicit_communication_only(|| x.quantized_linear(&up, None)?.quantized_linear(&down, None))?;
        assert!(y.placements()[0].is_partial(), "{}", y.layout());
        close(&y.full_tensor()?, &expected, "two layers");
        Ok(())
    })
    .unwrap();
}

#[test]
fn layers_hold_quantized_weights() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let table = blocks(5, 12, 2, BlockType::Q8_0);
        let whole = expanded(&table);
        let builder = Builder::new(&mesh);
        let embedding = Embedding::new(&builder, 12, 64)?;
        let ids = Tensor::new(&[[3u32, 0, 11], [7, 7, 5]], &Device::Cpu)?;
        let expected = whole.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 64))?;
        for placement in [Replicate, Shard(0), Shard(1)] {
            let blocks = DTensor::distribute_tensor(&table, &mesh, [placement.clone()], None)?;
            embedding.weight.set_quantized(&blocks)?;
            let ids = DTensor::distribute_tensor(&ids, &mesh, [Replicate], None)?;
            let found = embedding.forward(&ids)?;
            close(&found.full_tensor()?, &expected, &format!("lookup in {placement}"));
            // The same table as a head.
            let head = Linear { weight: embedding.weight.clone(), bias: None, hooks: builder.child("head").hooks() };
            let logits = head.forward(&found)?;
            let products = expected.reshape((6, 64))?.matmul(&whole.t()?)?.reshape((2, 3, 12))?;
            close(&logits.full_tensor()?, &products, &format!("head in {placement}"));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_pass_to_the_input() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let weight = blocks(9, 4, 2, BlockType::Q4_1);
        let x = DTensor::distribute_tensor(&inputs(3, 64), &mesh, [Replicate], None)?.requires_grad();
        let w = DTensor::distribute_tensor(&weight, &mesh, [Shard(0)], None)?;
        let loss = x.quantized_linear(&w, None)?.square()?.sum_all()?;
        let found = loss.backward()?.get(&x)?.full_tensor()?;
        let whole = DTensor::distribute_tensor(&expanded(&weight), &mesh, [Replicate], None)?;
        let expected = x.linear(&whole, None)?.square()?.sum_all()?.backward()?.get(&x)?.full_tensor()?;
        close(&found, &expected, "gradient");
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_operands_are_refused() {
    launch(1, |world| {
        let mesh = world.mesh([("tp", 1)])?;
        let place = |t: &Tensor| DTensor::distribute_tensor(t, &mesh, [Replicate], None);
        let weight = place(&blocks(1, 4, 2, BlockType::Q8_0))?;
        let error = place(&inputs(1, 32))?.quantized_linear(&weight, None).unwrap_err().to_string();
        assert!(error.contains("an f32 input [..., 64] for Q8_0 blocks"), "{error}");
        let double = place(&inputs(1, 64).to_dtype(DType::F64)?)?;
        assert!(double.quantized_linear(&weight, None).is_err());
        assert!(place(&inputs(1, 64))?.quantized_linear(&place(&inputs(4, 64))?, None).is_err());
        assert!(place(&inputs(1, 64))?.dequantize().is_err());
        let param = Param::new(&place(&inputs(4, 64))?);
        assert!(param.set_quantized(&place(&blocks(1, 5, 2, BlockType::Q8_0))?).is_err(), "other rows");
        assert!(param.set_quantized(&place(&inputs(4, 64))?).is_err(), "no blocks");
        param.set_quantized(&weight)?;
        param.set_quantized(&weight)?;
        assert_eq!(param.shape(), [4, 2, 34]);
        Ok(())
    })
    .unwrap();
}
