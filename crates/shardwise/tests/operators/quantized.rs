//! Quantized weights in memory: products and lookups in every layout are those of the expanded weight.

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::nn::{Embedding, Forward, Linear};
use shardwise::ops::{BlockType, QuantizedTensor};
use shardwise::param::Param;
use shardwise::prelude::*;
use shardwise_kernels::quantized::dequantize;

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

/// The weight with these blocks in a placement on one axis.
fn placed(blocks: &Tensor, block: BlockType, mesh: &DeviceMesh, placement: Placement) -> Result<QuantizedTensor> {
    QuantizedTensor::new(&DTensor::distribute_tensor(blocks, mesh, [placement], None)?, block)
}

fn expanded(blocks: &Tensor, block: BlockType) -> Tensor {
    dequantize(blocks, block).unwrap().flatten(1, 2).unwrap()
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
                let expected = x.matmul(&expanded(&weight, block).t()?)?.broadcast_add(&bias)?;
                let mut sizes = vec![1; ranks];
                sizes[0] = 7 - ranks;
                let ragged = Placement::ragged(1, sizes.clone());
                let of_features = Placement::ragged(1, sizes.iter().map(|n| n * 32).collect::<Vec<_>>());
                for of_weight in [Replicate, Shard(0), Shard(1), ragged] {
                    for of_x in [Replicate, Shard(0), Shard(1), of_features.clone()] {
                        let weight = placed(&weight, block, &mesh, of_weight.clone())?;
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
        let expected =
            x.matmul(&expanded(&up, BlockType::Q4_1).t()?)?.matmul(&expanded(&down, BlockType::Q8_0).t()?)?;
        // 3, 2 and 1 blocks of 32 features.
        let up = placed(&up, BlockType::Q4_1, &mesh, Placement::ragged(0, vec![96, 64, 32]))?;
        let down = placed(&down, BlockType::Q8_0, &mesh, Placement::ragged(1, vec![3, 2, 1]))?;
        let x = DTensor::distribute_tensor(&x, &mesh, [Replicate], None)?;
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
        let whole = expanded(&table, BlockType::Q8_0);
        let builder = Builder::new(&mesh);
        let embedding = Embedding::new(&builder, 12, 64)?;
        assert!(embedding.weight.quantized().is_none());
        let ids = Tensor::new(&[[3u32, 0, 11], [7, 7, 5]], &Device::Cpu)?;
        let expected = whole.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 64))?;
        for placement in [Replicate, Shard(0), Shard(1)] {
            embedding.weight.set_quantized(&placed(&table, BlockType::Q8_0, &mesh, placement.clone())?)?;
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
        let w = placed(&weight, BlockType::Q4_1, &mesh, Shard(0))?;
        let loss = x.quantized_linear(&w, None)?.square()?.sum_all()?;
        let found = loss.backward()?.get(&x)?.full_tensor()?;
        let whole = DTensor::distribute_tensor(&expanded(&weight, BlockType::Q4_1), &mesh, [Replicate], None)?;
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
        let quantized =
            |rows: usize, block: BlockType| QuantizedTensor::new(&place(&blocks(1, rows, 2, block))?, block);
        let weight = quantized(4, BlockType::Q8_0)?;
        let error = place(&inputs(1, 32))?.quantized_linear(&weight, None).unwrap_err().to_string();
        assert!(error.contains("an f32 input [..., 64] for Q8_0 blocks"), "{error}");
        let double = place(&inputs(1, 64).to_dtype(DType::F64)?)?;
        assert!(double.quantized_linear(&weight, None).is_err());
        let vector = QuantizedTensor::new(&weight.blocks().select(0, 0)?, BlockType::Q8_0)?;
        assert!(place(&inputs(1, 64))?.quantized_linear(&vector, None).is_err(), "not a matrix");
        for (bad, block) in [(place(&inputs(4, 34))?, BlockType::Q8_0), (weight.blocks().clone(), BlockType::Q4_0)] {
            let error = QuantizedTensor::new(&bad, block).unwrap_err();
            assert!(matches!(error.kind(), Some(ErrorKind::Shape { .. })), "{error}");
            assert!(error.to_string().contains(block.name()), "{error}");
        }
        let param = Param::new(&place(&inputs(4, 64))?);
        assert!(param.set_quantized(&quantized(5, BlockType::Q8_0)?).is_err(), "other rows");
        param.set_quantized(&weight)?;
        param.set_quantized(&weight)?;
        assert_eq!((param.shape(), param.quantized().unwrap().shape()), (vec![4, 2, 34], vec![4, 64]));
        assert!(param.set(&place(&blocks(1, 4, 2, BlockType::Q8_0).to_dtype(DType::F32)?)?).is_err(), "not blocks");
        param.set(weight.blocks())?;
        Ok(())
    })
    .unwrap();
}

/// `IQ4_NL` and `Q4_0` blocks have 18 bytes for 32 elements: what they stand for is in the type, not in the shape.
#[test]
fn blocks_of_one_size_and_two_types_are_not_confused() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let bytes = blocks(3, 6, 4, BlockType::Q4_0);
        let (x, ids) = (inputs(3, 128), Tensor::new(&[5u32, 0, 2], &Device::Cpu)?);
        let mut found = Vec::new();
        for block in [BlockType::Q4_0, BlockType::IQ4NL] {
            let whole = expanded(&bytes, block);
            for placement in [Replicate, Shard(0), Shard(1)] {
                let weight = placed(&bytes, block, &mesh, placement.clone())?;
                assert_eq!((weight.block_type(), weight.shape()), (block, vec![6, 128]));
                close(&weight.dequantize()?.full_tensor()?, &whole, "expanded");
                let layer = Linear::without_bias(&Builder::new(&mesh), 128, 6)?;
                layer.weight.set_quantized(&weight)?;
                // A plan moves the blocks and keeps their type.
                shardwise::plan::shard_parameter(&layer, &mesh, "weight", [Shard(0)])?;
                assert_eq!(layer.weight.quantized().unwrap().block_type(), block);
                let x = DTensor::distribute_tensor(&x, &mesh, [Replicate], None)?.requires_grad();
                let y = layer.forward(&x)?;
                close(&y.full_tensor()?, &inputs(3, 128).matmul(&whole.t()?)?, &format!("{block} in {placement}"));
                let gradient = y.sum_all()?.backward()?.get(&x)?.full_tensor()?;
                close(&gradient.get(0)?, &whole.sum(0)?, &format!("gradient of {block} in {placement}"));
                let ids = DTensor::distribute_tensor(&ids, &mesh, [Replicate], None)?;
                close(&weight.embedding(&ids)?.full_tensor()?, &whole.index_select(&ids.full_tensor()?, 0)?, "rows");
                let other = [BlockType::IQ4NL, BlockType::Q4_0][usize::from(block == BlockType::IQ4NL)];
                let error = layer.weight.set_quantized(&QuantizedTensor::new(weight.blocks(), other)?).unwrap_err();
                let names = [format!("{other} blocks"), format!("{block} blocks")];
                assert!(names.iter().all(|name| error.to_string().contains(name)), "{error}");
            }
            found.push(whole);
        }
        let largest = (&found[0] - &found[1])?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert!(largest > 0.01, "the types differ: {largest}");
        Ok(())
    })
    .unwrap();
}
