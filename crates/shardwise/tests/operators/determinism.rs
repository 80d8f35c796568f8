//! The bits of a result depend neither on the number of threads of a rank nor on whether AVX2 or AVX-512 computed it.
//!
//! Every case is large enough for threads. The digests of AVX2 come from this program, started once more with
//! `SHARDWISE_SIMD=avx2`; the baseline of x86-64 has no fused multiply-add and rounds differently, so it is not compared.

use candle_core::{Device, Tensor};
use shardwise::ops::{AttentionOptions, BlockType, ConvOptions, LossOptions, QuantizedTensor};
use shardwise::optim::{AdamW, ShardedOptimizer};
use shardwise::param::Param;
use shardwise::prelude::*;
use shardwise_test_suites::own_process::test_command;

/// Set for the program that prints digests.
const PRINT: &str = "SHARDWISE_TEST_PRINT_DIGESTS";

/// FNV-1a of the bytes of a tensor.
fn digest(tensor: &DTensor) -> Result<u64> {
    let bytes = shardwise_kernels::bytes_of(&tensor.full_tensor()?)?;
    Ok(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
}

/// Blocks `[rows, blocks, bytes]` of 1024 columns, of a type whose blocks begin with half floats, which are small here.
fn blocks(rows: usize, block: BlockType, halves: usize) -> Result<Tensor> {
    let count = 1024 / block.elements();
    let mut bytes: Vec<u8> = (0..rows * count * block.bytes()).map(|i| (i * 37 + i / 251 * 13) as u8).collect();
    for one in bytes.chunks_mut(block.bytes()) {
        (0..halves).for_each(|i| one[2 * i + 1] = 0x14 + one[2 * i + 1] % 8);
    }
    Ok(Tensor::from_vec(bytes, (rows, count, block.bytes()), &Device::Cpu)?)
}

/// Names and digests of results and gradients, computed by one rank with this number of threads.
fn digests(threads: usize) -> Vec<(String, u64)> {
    let program = move |world: World| {
        let mesh = world.mesh([("one", 1)])?;
        mesh.manual_seed(5);
        let normal = |shape: &[usize]| DTensor::randn(shape, &mesh, [Replicate]);
        let (m, square, bias) = (normal(&[700, 640])?, normal(&[640, 640])?, normal(&[640])?);
        let heads = [normal(&[2, 4, 300, 32])?, normal(&[2, 2, 300, 32])?, normal(&[2, 2, 300, 32])?];
        let (image, filter) = (normal(&[4, 8, 40, 40])?, normal(&[16, 8, 3, 3])?);
        let ids = DTensor::randint(0..500, (4000,), &mesh, [Replicate])?;
        let table = normal(&[500, 128])?;
        let classes = DTensor::randint(0..640, (700,), &mesh, [Replicate])?;
        let mut found = Vec::new();
        let mut add = |name: &str, tensors: &[&DTensor]| -> Result<()> {
            for tensor in tensors {
                found.push((name.to_string(), digest(tensor)?));
            }
            Ok(())
        };
        add("randn", &[&m])?;
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let (m, square) = (m.to_dtype(dtype)?, square.to_dtype(dtype)?);
            add("matmul", &[&m.matmul(&square)?])?;
            add("softmax", &[&m.softmax(-1)?])?;
            add("sum", &[&m.sum(&[0], false)?, &m.sum(&[1], false)?, &m.sum_all()?])?;
            add("cumsum", &[&m.cumsum(0)?, &m.cumsum(1)?])?;
            add("var", &[&m.var(&[1], 1.0, false)?])?;
        }
        let (sorted, order) = m.sort(-1, false)?;
        add("sort", &[&sorted, &order])?;
        add("topk", &[&m.topk(10, -1, true)?.0])?;
        add("sin", &[&m.sin()?, &m.mul_scalar(1e6)?.cos()?])?;
        add("exp", &[&m.exp()?, &m.abs()?.log()?, &m.tanh()?, &m.erf()?, &m.sigmoid()?, &m.abs()?.pow_scalar(1.7)?])?;
        add("dropout", &[&m.dropout(0.3, true)?])?;
        // Rows of a prompt and of one token are computed in other tiles.
        let rows = [normal(&[37, 1024])?, normal(&[1, 1024])?];
        for (block, halves) in [(BlockType::Q8_0, 1), (BlockType::Q4_1, 2), (BlockType::Q4K, 2)] {
            let bytes = DTensor::distribute_tensor(&blocks(701, block, halves)?, &mesh, [Replicate], None)?;
            let weight = QuantizedTensor::new(&bytes, block)?;
            for x in &rows {
                add(&format!("quantized_linear of {block}"), &[&x.quantized_linear(&weight, None)?])?;
            }
        }
        add("transpose", &[&m.t()?.add_scalar(0.0)?])?;
        let mut differentiate = |name: &str, inputs: &[&DTensor], op: &dyn Fn(&[DTensor]) -> Result<DTensor>| {
            let leaves: Vec<DTensor> = inputs.iter().map(|x| x.requires_grad()).collect();
            let result = op(&leaves)?;
            let grads = result.square()?.sum_all()?.backward()?;
            add(name, &[&result])?;
            leaves.iter().try_for_each(|leaf| add(&format!("gradient of {name}"), &[grads.get(leaf)?]))
        };
        differentiate("linear", &[&m, &square, &bias], &|x| x[0].linear(&x[1], Some(&x[2])))?;
        differentiate("layer_norm", &[&m, &bias, &bias], &|x| x[0].layer_norm(1, Some(&x[1]), Some(&x[2]), 1e-5))?;
        differentiate("rms_norm", &[&m, &bias], &|x| x[0].rms_norm(1, Some(&x[1]), 1e-5))?;
        differentiate("add_layer_norm", &[&m, &m, &bias], &|x| {
            let (sum, normal) = x[0].add_layer_norm(&x[1], Some(&x[2]), Some(&x[2]), 1e-5)?;
            sum.mul(&normal)
        })?;
        differentiate("three uses", &[&m, &square, &bias], &|x| {
            let each = |x: &[DTensor]| x[0].linear(&x[1], Some(&x[2]));
            each(x)?.add(&each(x)?.square()?)?.add(&x[0].rms_norm(1, Some(&x[2]), 1e-5)?.sum_all()?)
        })?;
        differentiate("gelu", &[&m], &|x| x[0].gelu()?.add(&x[0].gelu_tanh()?)?.add(&x[0].silu()?))?;
        differentiate("cross_entropy", &[&m], &|x| x[0].cross_entropy(&classes, LossOptions::default()))?;
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let [q, k, v] = &heads;
        differentiate("attention", &[q, k, v], &|x| x[0].scaled_dot_product_attention(&x[1], &x[2], causal))?;
        let padded = ConvOptions { padding: 1, ..ConvOptions::default() };
        differentiate("conv2d", &[&image, &filter], &|x| x[0].conv2d(&x[1], None, padded))?;
        differentiate("max_pool2d", &[&image], &|x| x[0].max_pool2d(2, None, 0))?;
        differentiate("batch_norm", &[&image], &|x| x[0].batch_norm(None, None, None, 1e-5))?;
        differentiate("embedding", &[&table], &|x| x[0].embedding(&ids))?;
        let param = Param::new(&square);
        let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], AdamW::default())?;
        for _ in 0..3 {
            let loss = m.matmul(&param.get())?.square()?.mean_all()?;
            optimizer.step(loss.backward()?)?;
        }
        add("adamw", &[&param.get()])?;
        Ok(found)
    };
    ThreadWorld::new(1).unwrap().kernel_threads(threads).run(program).unwrap().swap_remove(0)
}

fn assert_same(found: &[(String, u64)], expected: &[(String, u64)], with: &str) {
    assert_eq!(found.len(), expected.len());
    let differing: Vec<&str> =
        found.iter().zip(expected).filter(|(a, b)| a != b).map(|((name, _), _)| name.as_str()).collect();
    assert!(differing.is_empty(), "{with}: other bits in {differing:?}");
}

#[test]
fn bits_do_not_depend_on_threads() {
    let expected = digests(1);
    for threads in [2, 4] {
        assert_same(&digests(threads), &expected, &format!("{threads} threads"));
    }
}

/// Not a test by itself: prints the digests for the test below.
#[test]
fn print_digests() {
    if std::env::var_os(PRINT).is_some() {
        for (name, digest) in digests(1) {
            println!("\ndigest {digest:016x} {name}");
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn bits_are_those_of_avx2_with_avx512() {
    if !is_x86_feature_detected!("avx512vl") || !is_x86_feature_detected!("avx512bw") {
        println!("not compared: this processor has no AVX-512");
        return;
    }
    let of = |set: &str| -> Vec<(String, u64)> {
        let mut program = test_command(module_path!(), "print_digests");
        program.env(PRINT, "1").env("SHARDWISE_SIMD", set);
        let output = program.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{set}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let digests = text.lines().filter_map(|line| line.strip_prefix("digest ")?.split_once(' '));
        digests.map(|(hash, name)| (name.to_string(), u64::from_str_radix(hash, 16).unwrap())).collect()
    };
    let expected = of("avx512");
    assert!(expected.len() > 50, "{expected:?}");
    assert_same(&of("avx2"), &expected, "avx2");
}
