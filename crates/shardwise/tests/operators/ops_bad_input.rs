//! Invalid operands: every operator rejects them on every rank with one message that names the operator, shapes, placements
//! and mesh; no rank hangs, and the world stays usable. The unsharded call decides what is invalid.

use std::time::Duration;

use candle_core::Tensor;
use shardwise::ops::{
    AttentionOptions, ConvOptions, ConvTransposeOptions, EmbeddingBagMode, LossOptions, OpEntry, Reduction,
    SampleInput, composed_ops, ops,
};
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// Far longer than any of these calls takes: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(20);

/// Operators of the table that call other operators, and which of these refuse: their messages name the tensors and the
/// line of the program.
const MADE_OF: &[(&str, &[&str])] = &[
    ("add_layer_norm", &["add"]),
    ("add_rms_norm", &["add"]),
    ("linear", &["einsum", "add"]),
    ("addmm", &["mm", "add"]),
    ("baddbmm", &["bmm", "add"]),
    ("group_norm", &["mul"]),
    ("batch_norm", &["mul"]),
    ("mse_loss", &["sub"]),
    ("l1_loss", &["sub"]),
    ("smooth_l1_loss", &["sub"]),
    ("bce_with_logits", &["mul"]),
    ("kl_div", &["sub"]),
    ("stack", &["cat"]),
    ("embedding_bag", &["embedding"]),
    ("scatter_add", &["add"]),
    ("index_add", &["add"]),
    ("index_put", &["index_add", "add"]),
    ("cross_entropy", &["gather"]),
    ("nll_loss", &["gather"]),
    ("scaled_dot_product_attention", &["matmul"]),
    ("masked_fill", &["where_cond"]),
    ("lerp", &["sub"]),
    ("linalg_cholesky_ex", &["linalg_cholesky"]),
    ("linalg_ldl_factor", &["linalg_cholesky"]),
    ("linalg_ldl_solve", &["linalg_cholesky"]),
    ("linalg_eigh", &["linalg_cholesky"]),
    ("linalg_eigvalsh", &["linalg_cholesky"]),
    ("linalg_matrix_sqrth", &["linalg_cholesky"]),
    ("linalg_cond", &["linalg_inv_ex"]),
    ("linalg_matrix_power", &["linalg_inv"]),
    ("linalg_lu_solve", &["lu_unpack"]),
    ("linalg_tensorinv", &["linalg_inv"]),
    ("linalg_tensorsolve", &["linalg_solve"]),
    ("linalg_multi_dot", &["einsum"]),
    ("linalg_vecdot", &["mul"]),
    ("linalg_cross", &["mul"]),
    ("ormqr", &["linalg_householder_product", "matmul"]),
    ("scatter_reduce", &["scatter_add"]),
    ("put", &["index_add"]),
    ("index_fill", &["index_add"]),
];

/// Operators whose samples have inputs that they do not use together: those of other operators of the family.
const SEPARATE_INPUTS: &[&str] = &[
    "take",
    "take_along_dim",
    "slice_scatter",
    "select_scatter",
    "diagonal_scatter",
    "index_fill",
    "renorm",
    "pdist",
    "normalize",
    "combinations",
];

/// Whether a message names the operator, and a tensor with its mesh and placements.
fn is_good(op: &str, message: &str) -> bool {
    let parts = MADE_OF.iter().find(|(name, _)| *name == op).map_or(&[][..], |(_, parts)| parts);
    let refuses =
        |part: &&str| message.contains(&format!("called as {part}(")) || message.contains(&format!(" in {part},"));
    // What is composed of other operators is refused by one of them, which may have got only a part of the tensors or their shapes.
    if composed_ops().any(|entry| entry.name == op) {
        return message.contains("found ") && message.contains("needed ");
    }
    let named = message.contains(op) || parts.iter().any(refuses);
    named && message.contains(" on a=2: ")
}

fn input(mesh: &DeviceMesh, sample: &SampleInput, last: bool) -> Result<DTensor> {
    let placement = match sample.shape.len() {
        _ if mesh.mesh().size() == 1 => Replicate,
        0 => Replicate,
        _ if last => Shard(-1),
        _ => Shard(0),
    };
    let layout = Layout::new(mesh.mesh(), sample.shape.as_slice(), [placement.clone()])?;
    let value = |flat: usize| match sample.below {
        Some(n) => (flat % n) as f64,
        None => values::value(flat),
    };
    let local = values::local_of(&layout, mesh.world().rank(), 0, &value).to_dtype(sample.dtype)?;
    DTensor::from_local_with_shape(&local, mesh, [placement], sample.shape.as_slice())
}

/// Valid calls with one input changed: another number of dimensions, another size, another type.
fn changed(samples: &[SampleInput]) -> Vec<(String, Vec<SampleInput>)> {
    let mut calls = Vec::new();
    for (i, sample) in samples.iter().enumerate() {
        let mut with = |what: String, changed: SampleInput| {
            let mut all = samples.to_vec();
            all[i] = changed;
            calls.push((format!("input {i} with {what}"), all));
        };
        // Longer than any index, so that no index is wrong for it.
        let wider = [&[9], sample.shape.as_slice()].concat();
        with("a dimension more in front".into(), SampleInput { shape: wider, ..sample.clone() });
        let deeper = [sample.shape.as_slice(), &[3]].concat();
        with("a dimension more at the end".into(), SampleInput { shape: deeper, ..sample.clone() });
        for dim in 0..sample.shape.len() {
            let mut shape = sample.shape.clone();
            shape[dim] += 1;
            with(format!("dimension {dim} longer"), SampleInput { shape, ..sample.clone() });
        }
        let dtype = if sample.dtype.is_float() { DType::I64 } else { DType::F64 };
        with(format!("type {}", dtype.as_str()), SampleInput { dtype, ..sample.clone() });
    }
    calls
}

/// Runs a call on the mesh and on this rank only. The two must agree; an error is the message.
fn judge(
    op: &OpEntry,
    mesh: &DeviceMesh,
    alone: &DeviceMesh,
    call: &(String, Vec<SampleInput>),
    last: bool,
) -> Result<Option<String>> {
    let (what, samples) = call;
    let inputs = |mesh: &DeviceMesh| samples.iter().map(|s| input(mesh, s, last)).collect::<Result<Vec<_>>>();
    let plain = (op.apply)(&inputs(alone)?);
    let sharded = (op.apply)(&inputs(mesh)?);
    match (plain, sharded) {
        (Ok(plain), Ok(sharded)) => {
            // Integers are converted to f32 for floating-point results.
            let single = samples.iter().any(|s| s.dtype != DType::F64);
            // Losses that are reduced may differ by the rounding of their terms.
            let full = plain.iter().map(DTensor::full_tensor).collect::<Result<Vec<_>>>()?;
            let count = full.iter().map(Tensor::elem_count).max().unwrap_or(1).max(1) as f64;
            let terms = count.sqrt() * full.iter().map(values::max_abs).fold(1.0, f64::max);
            for (a, b) in sharded.iter().zip(&full) {
                let dtype = if single && a.dtype() == DType::F64 { DType::F32 } else { a.dtype() };
                let (got, expected) = (a.full_tensor()?.to_dtype(dtype)?, b.to_dtype(dtype)?);
                assert!(values::close(&got, &expected, terms), "{} of {what}: got {got}, expected {expected}", op.name);
            }
            Ok(None)
        }
        (Err(_), Err(error)) => {
            let message = error.to_string();
            let said = if is_good(op.name, &message) { "says" } else { "says too little" };
            Ok(Some(format!("{} of {what} {said}: {message}", op.name)))
        }
        (Ok(_), Err(error)) => panic!("{} of {what} works unsharded: {error}", op.name),
        (Err(error), Ok(_)) => panic!("{} of {what} works only sharded: {error}", op.name),
    }
}

#[test]
fn mutated_inputs_fail_alike_on_every_rank_or_give_the_unsharded_result() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let (mut messages, mut fine) = (Vec::new(), 0);
        for op in ops().chain(composed_ops()) {
            for samples in (op.samples)() {
                for call in changed(&samples) {
                    for last in [false, true] {
                        match judge(op, &mesh, &alone, &call, last)? {
                            Some(message) => messages.push(message),
                            None => fine += 1,
                        }
                    }
                }
            }
            still_works(&world)?;
        }
        Ok((messages, fine))
    };
    let results = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run(run).unwrap();
    let (messages, fine) = &results[0];
    compare(messages, &results[1].0);
    assert!(messages.len() > 500, "only {} calls were refused", messages.len());
    println!("{} calls refused, {fine} fine", messages.len());
}

/// The messages of two ranks are the same.
fn compare(a: &[String], b: &[String]) {
    // Which of several wrong indices a rank holds differs.
    let without_index = |message: &String| match message.split_once(": invalid index: found ") {
        Some((before, after)) => format!("{before}{}", after.split_once(' ').map_or("", |(_, rest)| rest)),
        None => message.clone(),
    };
    let other: Vec<_> = a.iter().zip(b).filter(|(a, b)| without_index(a) != without_index(b)).collect();
    assert!(other.is_empty() && a.len() == b.len(), "ranks report differently: {other:#?}");
    let mut poor: Vec<&String> = a.iter().filter(|m| m.contains("says too little")).collect();
    poor.dedup();
    assert!(poor.is_empty(), "{poor:#?}");
}

/// The world is still usable: ranks run a collective.
fn still_works(world: &World) -> Result<()> {
    let one = Tensor::ones(1, DType::F32, &candle_core::Device::Cpu)?;
    let sum = world.all_reduce(&one, ReduceOp::Sum)?.to_vec1::<f32>()?;
    assert_eq!(sum, [world.size() as f32]);
    Ok(())
}

#[test]
fn every_operator_rejects_an_input_on_another_mesh() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let other = world.mesh([("b", 2)])?;
        let mut messages = Vec::new();
        for op in ops().chain(composed_ops()) {
            let samples = (op.samples)().swap_remove(0);
            if samples.len() < 2 {
                continue;
            }
            for far in 0..samples.len() {
                let inputs =
                    samples.iter().enumerate().map(|(i, s)| input(if i == far { &other } else { &mesh }, s, false));
                let Err(error) = (op.apply)(&inputs.collect::<Result<Vec<_>>>()?) else {
                    if !SEPARATE_INPUTS.contains(&op.name) {
                        messages.push(format!("{} says too little: it takes input {far} from another mesh", op.name));
                    }
                    continue;
                };
                let message = error.to_string();
                let both = message.contains(" on b=2: ") && message.contains("one mesh");
                let said = if both && is_good(op.name, &message) { "says" } else { "says too little" };
                messages.push(format!("{} {said}: {message}", op.name));
            }
            still_works(&world)?;
        }
        Ok(messages)
    };
    let results = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run(run).unwrap();
    compare(&results[0], &results[1]);
    assert!(results[0].len() > 100);
}

/// Calls with an index that is out of range: the operator that must be named, and the call.
type Indexed = fn(&DTensor, &DTensor) -> Result<DTensor>;
const INDEXED: &[(&str, Indexed)] = &[
    ("index_select", |x, ids| x.index_select(0, ids)),
    ("index", |x, ids| x.index(ids)),
    ("embedding", |x, ids| x.embedding(ids)),
    ("embedding", |x, ids| x.embedding_bag(&ids.unsqueeze(1)?, None, EmbeddingBagMode::Sum)),
    ("gather", |x, ids| x.gather(0, &ids.unsqueeze(1)?)),
    ("gather", |x, ids| x.gather(1, &ids.unsqueeze(1)?)),
    ("scatter", |x, ids| x.scatter(0, &ids.unsqueeze(1)?, &ids.unsqueeze(1)?)),
    ("scatter_add", |x, ids| x.scatter_add(1, &ids.unsqueeze(1)?, x)),
    ("index_add", |x, ids| x.index_add(0, ids, x)),
    ("index_put", |x, ids| x.index_put(&[ids], x, true)),
    ("cross_entropy", |x, ids| x.cross_entropy(ids, LossOptions::default())),
];

#[test]
fn an_index_that_one_rank_finds_wrong_is_an_error_on_every_rank() {
    for (op, call) in INDEXED {
        for wrong in [4, 6, -9] {
            for placement in [Shard(0), Replicate, Partial(ReduceOp::Sum)] {
                let whole = placement == Replicate;
                let run = move |world: World| {
                    let mesh = world.mesh([("a", 2)])?;
                    let x = DTensor::ones((4, 4), DType::F64, &mesh, [Replicate])?;
                    let id = |at: &[usize]| if at[0] == 3 { f64::from(wrong) } else { at[0] as f64 };
                    let ids =
                        DTensor::from_fn(4, DType::I64, &mesh, [Replicate], id)?.redistribute([placement.clone()])?;
                    call(&x, &ids)?;
                    world.barrier()
                };
                let results = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run_each(run);
                let texts: Vec<String> =
                    results.iter().map(|r| r.as_ref().expect_err("an index is wrong").to_string()).collect();
                let said = [format!("found {wrong} in"), format!("found class {wrong} among")];
                let found = texts[1].contains(op) && said.iter().any(|said| texts[1].contains(said));
                assert!(found && texts[1].contains(" on a=2: "), "{op} says too little: {}", texts[1]);
                // A rank that holds the bad index reports it; any other rank gets the error from its peer.
                let heard = texts[0].contains("rank 1") && texts[0].contains(&texts[1]);
                assert!(texts[0] == texts[1] || heard && !whole, "{op} of {wrong}: {texts:?}");
            }
        }
    }
}

type Call = fn(&Operands) -> Result<Vec<DTensor>>;

/// Operands of the calls below.
struct Operands {
    /// `[4, 6]`, f64.
    x: DTensor,
    /// `[4, 6]`, i64, of numbers below 4.
    ids: DTensor,
    /// `[2, 2, 8]`, f64.
    line: DTensor,
    /// `[2, 4, 3, 2]`, f64.
    heads: DTensor,
    /// `[]`, f64.
    scalar: DTensor,
}

impl Operands {
    fn new(mesh: &DeviceMesh, placement: &Placement) -> Result<Self> {
        let make = |shape: &[usize], dtype: DType| {
            let whole = DTensor::from_fn(shape, dtype, mesh, [Replicate], |at| (at.iter().sum::<usize>() % 4) as f64)?;
            whole.redistribute([if shape.is_empty() { Replicate } else { placement.clone() }])
        };
        Ok(Operands {
            x: make(&[4, 6], DType::F64)?,
            ids: make(&[4, 6], DType::I64)?,
            line: make(&[2, 2, 8], DType::F64)?,
            heads: make(&[2, 4, 3, 2], DType::F64)?,
            scalar: make(&[], DType::F64)?,
        })
    }
}

/// Calls with invalid arguments: the operator that must be named, what else the message must say, and the call.
const CALLS: &[(&str, &[&str], Call)] = &[
    ("sum", &["[7]"], |o| Ok(vec![o.x.sum(&[7], false)?])),
    ("mean", &["[-3]"], |o| Ok(vec![o.x.mean(&[-3], false)?])),
    ("prod", &["[0, 0]"], |o| Ok(vec![o.x.prod(&[0, 0], true)?])),
    ("amax", &["[2]"], |o| Ok(vec![o.x.amax(&[2], false)?])),
    ("softmax", &["[9]"], |o| Ok(vec![o.x.softmax(9)?])),
    ("log_softmax", &["[2]"], |o| Ok(vec![o.x.log_softmax(2)?])),
    ("logsumexp", &["[-3]"], |o| Ok(vec![o.x.logsumexp(&[-3], false)?])),
    ("var", &["[2]"], |o| Ok(vec![o.x.var(&[2], 0.0, false)?])),
    ("norm", &["[2]"], |o| Ok(vec![o.x.norm(2.0, &[2], false)?])),
    ("layer_norm", &["3 dimension(s)"], |o| Ok(vec![o.x.layer_norm(3, None, None, 1e-5)?])),
    ("rms_norm", &["0 dimension(s)"], |o| Ok(vec![o.x.rms_norm(0, None, 1e-5)?])),
    ("group_norm", &["4 groups"], |o| Ok(vec![o.x.group_norm(4, None, None, 1e-5)?])),
    ("narrow", &["3 from 4"], |o| Ok(vec![o.x.narrow(1, 4, 3)?])),
    ("narrow", &["[5]"], |o| Ok(vec![o.x.narrow(5, 0, 1)?])),
    ("narrow", &["from 18446744073709551615"], |o| Ok(vec![o.x.narrow(0, usize::MAX, 2)?])),
    ("slice", &["step 0"], |o| Ok(vec![o.x.slice(0, 0, None, 0)?])),
    ("select", &["index 4"], |o| Ok(vec![o.x.select(0, 4)?])),
    ("select", &["index -5"], |o| Ok(vec![o.x.select(0, -5)?])),
    ("split", &["size 0"], |o| o.x.split(0, 0)),
    ("split", &["[1, 2]"], |o| o.x.split_sizes(&[1, 2], 0)),
    ("chunk", &["0 pieces"], |o| o.x.chunk(0, 0)),
    ("unbind", &["[2]"], |o| o.x.unbind(2)),
    ("reshape", &["[5, 5]", "24"], |o| Ok(vec![o.x.reshape(&[5, 5])?])),
    ("reshape", &["[-1, -1]"], |o| Ok(vec![o.x.reshape(&[-1, -1])?])),
    ("reshape", &["[-2, 12]"], |o| Ok(vec![o.x.reshape(&[-2, 12])?])),
    ("flatten", &["[1, 0]"], |o| Ok(vec![o.x.flatten(1, 0)?])),
    ("unflatten", &["[4, 2]"], |o| Ok(vec![o.x.unflatten(1, &[4, 2])?])),
    ("permute", &["[0, 0]"], |o| Ok(vec![o.x.permute(&[0, 0])?])),
    ("permute", &["[0]"], |o| Ok(vec![o.x.permute(&[0])?])),
    ("transpose", &["[2]"], |o| Ok(vec![o.x.transpose(0, 2)?])),
    ("movedim", &["[-3]"], |o| Ok(vec![o.x.movedim(-3, 0)?])),
    ("t", &["a matrix"], |o| Ok(vec![o.line.t()?])),
    ("unsqueeze", &["[4]"], |o| Ok(vec![o.x.unsqueeze(4)?])),
    ("squeeze", &["[2]"], |o| Ok(vec![o.x.squeeze(Some(2))?])),
    ("expand", &["[4, 7]"], |o| Ok(vec![o.x.expand(&[4, 7])?])),
    ("expand", &["[6]"], |o| Ok(vec![o.x.expand(&[6])?])),
    ("expand", &["[-1, 4, 6]"], |o| Ok(vec![o.x.expand(&[-1, 4, 6])?])),
    ("flip", &["[2]"], |o| Ok(vec![o.x.flip(&[2])?])),
    ("flip", &["[0, 0]"], |o| Ok(vec![o.x.flip(&[0, 0])?])),
    ("roll", &["2 shifts"], |o| Ok(vec![o.x.roll(&[1, 2], &[0])?])),
    ("roll", &["[3]"], |o| Ok(vec![o.x.roll(&[1], &[3])?])),
    ("pad", &["3 borders"], |o| Ok(vec![o.x.pad(&[(1, 1), (0, 0), (2, 2)], 0.0)?])),
    ("repeat", &["1 numbers"], |o| Ok(vec![o.x.repeat(&[2])?])),
    ("repeat_interleave", &["[2]"], |o| Ok(vec![o.x.repeat_interleave(2, 2)?])),
    ("cat", &["[4, 6]", "[6, 4]"], |o| Ok(vec![DTensor::cat(&[&o.x, &o.x.t()?], 0)?])),
    ("cat", &["[2]"], |o| Ok(vec![DTensor::cat(&[&o.x, &o.x], 2)?])),
    ("stack", &["[4, 6]", "[6, 4]"], |o| Ok(vec![DTensor::stack(&[&o.x, &o.x.t()?], 0)?])),
    ("tril", &["two dimensions"], |o| Ok(vec![o.x.select(0, 0)?.tril(0)?])),
    ("diagonal", &["two dimensions"], |o| Ok(vec![o.x.select(0, 0)?.diagonal(0)?])),
    ("index_select", &["[9]"], |o| Ok(vec![o.x.index_select(9, &o.ids.select(0, 0)?)?])),
    ("index_select", &["a vector"], |o| Ok(vec![o.x.index_select(0, &o.ids)?])),
    ("index", &["f64", "integers"], |o| Ok(vec![o.x.index(&o.x)?])),
    ("embedding", &["[vocabulary, features]"], |o| Ok(vec![o.line.embedding(&o.ids)?])),
    ("embedding_bag", &["offsets [1, 2]"], |o| {
        Ok(vec![o.x.embedding_bag(&o.ids.select(0, 0)?, Some(&[1, 2]), EmbeddingBagMode::Sum)?])
    }),
    ("gather", &["[9]"], |o| Ok(vec![o.x.gather(9, &o.ids)?])),
    ("gather", &["[4, 6, 1]"], |o| Ok(vec![o.x.gather(0, &o.ids.unsqueeze(2)?)?])),
    ("one_hot", &["f64", "integers"], |o| Ok(vec![o.x.one_hot(4)?])),
    ("bucketize", &["a vector"], |o| Ok(vec![o.x.bucketize(&o.x)?])),
    ("scatter", &["[2]"], |o| Ok(vec![o.x.scatter(2, &o.ids, &o.x)?])),
    ("scatter_add", &["[4, 6, 1]"], |o| Ok(vec![o.x.scatter_add(0, &o.ids.unsqueeze(2)?, &o.x)?])),
    ("scatter_add", &["f64", "integers"], |o| Ok(vec![o.x.scatter_add(0, &o.x, &o.x)?])),
    ("index_add", &["[-3]"], |o| Ok(vec![o.x.index_add(-3, &o.ids.select(1, 0)?, &o.x)?])),
    ("index_add", &["[6]", "[4, 6]"], |o| Ok(vec![o.x.index_add(0, &o.ids.select(0, 0)?, &o.x)?])),
    ("index_put", &["one index per leading dimension"], |o| Ok(vec![o.x.index_put(&[], &o.x, true)?])),
    ("index_put", &["[2, 2, 8]"], |o| Ok(vec![o.x.index_put(&[&o.ids.select(1, 0)?], &o.line, true)?])),
    ("sort", &["[2]"], |o| Ok(vec![o.x.sort(2, false)?.0])),
    ("topk", &["7 along dimension 1"], |o| Ok(vec![o.x.topk(7, 1, true)?.0])),
    ("kthvalue", &["k of at least 1"], |o| Ok(vec![o.x.kthvalue(0, 1, true)?.0])),
    ("kthvalue", &["7 along dimension 1"], |o| Ok(vec![o.x.kthvalue(7, 1, true)?.0])),
    ("argmax", &["[2]"], |o| Ok(vec![o.x.argmax(Some(2), false)?])),
    ("max_dim", &["1 along dimension 0"], |o| Ok(vec![o.x.narrow(0, 0, 0)?.max_dim(0, false)?.0])),
    ("argmin", &["1 along dimension"], |o| Ok(vec![o.x.narrow(0, 0, 0)?.argmin(None, false)?])),
    ("amin", &["at least one element"], |o| Ok(vec![o.x.narrow(0, 0, 0)?.amin(&[0], false)?])),
    ("cumsum", &["[2]"], |o| Ok(vec![o.x.cumsum(2)?])),
    ("cummax", &["[-3]"], |o| Ok(vec![o.x.cummax(-3)?.0])),
    ("einsum", &["one size for `j`", "6 and 4"], |o| Ok(vec![DTensor::einsum("ij,jk", &[&o.x, &o.x])?])),
    ("einsum", &["one size for `i` of a diagonal", "4 and 6"], |o| Ok(vec![DTensor::einsum("ii->i", &[&o.x])?])),
    ("einsum", &["`i1->i`"], |o| Ok(vec![DTensor::einsum("i1->i", &[&o.x])?])),
    ("einsum", &["one size for `j`", "6 and 4"], |o| Ok(vec![DTensor::einsum("ij,jk->ik", &[&o.x, &o.x])?])),
    ("matmul", &["scalar"], |o| Ok(vec![o.x.matmul(&o.scalar)?])),
    ("bmm", &["3 dimension(s)"], |o| Ok(vec![o.x.bmm(&o.x)?])),
    ("linear", &["[2, 2, 8]"], |o| Ok(vec![o.x.linear(&o.line, None)?])),
    ("bitwise_and", &["integers"], |o| Ok(vec![o.x.bitwise_and(&o.ids)?])),
    ("dropout", &["1.5"], |o| Ok(vec![o.x.dropout(1.5, true)?])),
    ("dropout", &["i64"], |o| Ok(vec![o.ids.dropout(0.5, true)?])),
    ("cross_entropy", &["[4, 6]"], |o| Ok(vec![o.x.cross_entropy(&o.ids, LossOptions::default())?])),
    ("nll_loss", &["f64"], |o| Ok(vec![o.x.nll_loss(&o.x.select(1, 0)?, LossOptions::default())?])),
    ("mse_loss", &["[4, 6]", "[2, 2, 8]"], |o| Ok(vec![o.x.mse_loss(&o.line, Reduction::Sum)?])),
    ("scaled_dot_product_attention", &["[2, 4, 3, 2]", "[2, 3, 3, 2]"], |o| {
        let fewer = o.heads.narrow(1, 0, 3)?;
        Ok(vec![o.heads.scaled_dot_product_attention(&fewer, &fewer, AttentionOptions::default())?])
    }),
    ("rotary_embedding", &["an even number"], |o| Ok(vec![o.x.narrow(1, 0, 5)?.rotary_embedding(100.0, 0)?])),
    ("conv1d", &["[2, 2, 5]", "size: 8"], |o| {
        let long = DTensor::cat(&[&o.line, &o.line], 2)?;
        Ok(vec![o.line.narrow(2, 0, 5)?.conv1d(&long.narrow(2, 0, 8)?, None, ConvOptions::default())?])
    }),
    ("conv1d", &["3 group(s)"], |o| {
        Ok(vec![o.line.conv1d(&o.line, None, ConvOptions { groups: 3, ..ConvOptions::default() })?])
    }),
    ("conv1d", &["stride: 0"], |o| {
        Ok(vec![o.line.conv1d(&o.line, None, ConvOptions { stride: 0, ..ConvOptions::default() })?])
    }),
    ("conv1d", &["one number, or 1"], |o| {
        let two = ConvOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };
        Ok(vec![o.line.conv1d(&o.line, None, two)?])
    }),
    ("conv_transpose1d", &["output padding [1]"], |o| {
        let options = ConvTransposeOptions { output_padding: 1, ..ConvTransposeOptions::default() };
        Ok(vec![o.line.conv_transpose1d(&o.line, None, options)?])
    }),
    ("conv2d", &["[2, 2, 8]"], |o| Ok(vec![o.line.conv2d(&o.line, None, ConvOptions::default())?])),
    ("avg_pool1d", &["size: 9"], |o| Ok(vec![o.line.avg_pool1d(9, None, 0)?])),
    ("max_pool2d", &["[n, channels, ...]"], |o| Ok(vec![o.line.max_pool2d(2, None, 0)?])),
    ("max_pool1d", &["half a window"], |o| Ok(vec![o.line.max_pool1d(2, None, 2)?])),
    ("avg_pool1d", &["size: 0"], |o| Ok(vec![o.line.avg_pool1d(0, None, 0)?])),
];

#[test]
fn invalid_arguments_are_rejected_with_the_value_found() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let mut messages = Vec::new();
        for placement in [Shard(0), Shard(1), Partial(ReduceOp::Sum)] {
            let operands = Operands::new(&mesh, &placement)?;
            for (op, parts, call) in CALLS {
                let Err(error) = call(&operands) else { panic!("{op} takes {parts:?}") };
                let message = error.to_string();
                let said = parts.iter().all(|part| message.contains(part)) && is_good(op, &message);
                let said = if said { "says" } else { "says too little" };
                messages.push(format!("{op} with {parts:?} {said}: {message}"));
            }
            still_works(&world)?;
        }
        Ok(messages)
    };
    let results = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run(run).unwrap();
    compare(&results[0], &results[1]);
}
