//! Compares every collective of an engine with a reference implementation, on a group of any size.
//!
//! Every rank generates the inputs of all ranks from their rank numbers, so that it knows the expected result without
//! communication. Results must be bit-identical, on every rank and in a second call.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use shardwise::{Group, ReduceOp, Result, TensorMeta};

/// The element types that every collective is tried with.
pub const DTYPES: [DType; 9] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I16, DType::U32, DType::U8];

/// Runs the suite on a group and returns the number of collectives checked. Collective: every rank of the group calls it.
pub fn run(group: &Group) -> Result<usize> {
    let mut suite = Suite { group, checked: 0 };
    for dtype in DTYPES {
        for sizes in suite.size_patterns() {
            for dim in 0..3 {
                suite.moves(dtype, dim, &sizes)?;
            }
            suite.exchanges(dtype, &sizes)?;
        }
        suite.reductions(dtype)?;
        suite.all_to_all(dtype)?;
        suite.messages(dtype)?;
    }
    group.barrier()?;
    Ok(suite.checked)
}

struct Suite<'a> {
    group: &'a Group,
    checked: usize,
}

impl Suite<'_> {
    fn n(&self) -> usize {
        self.group.size()
    }

    /// Even and uneven shards, empty ones in the middle, all empty, everything on the last rank, and shards large
    /// enough for an engine that switches to another algorithm for large tensors.
    fn size_patterns(&self) -> Vec<Vec<usize>> {
        let n = self.n();
        vec![
            vec![2; n],
            (0..n).map(|r| 1 + (r * 2) % 3).collect(),
            (0..n).map(|r| if r % 2 == 1 { 0 } else { 2 }).collect(),
            vec![0; n],
            (0..n).map(|r| if r + 1 == n { 3 } else { 0 }).collect(),
            (0..n).map(|r| 900 + r).collect(),
        ]
    }

    /// gather, all_gather, scatter, broadcast and reduce_scatter of tensors that are `sizes` along `dim`.
    fn moves(&mut self, dtype: DType, dim: usize, sizes: &[usize]) -> Result<()> {
        let (group, me) = (self.group, self.group.rank());
        let mut shape = [3, 2, 4];
        let parts: Vec<Tensor> = (0..self.n())
            .map(|r| {
                shape[dim] = sizes[r];
                tensor(dtype, &shape, r as u64)
            })
            .collect();
        let whole = plain_cat(&parts, dim);
        self.expect("all_gather", || group.all_gather(&parts[me], dim, sizes), &whole)?;
        self.expect("all_gather", || group.all_gather(&strided(&parts[me]), dim, sizes), &whole)?;
        let root = sizes.iter().sum::<usize>() % self.n();
        let meta = TensorMeta::new(whole.dims(), dtype);
        self.expect_at(root, "gather", || group.gather(&parts[me], dim, sizes, root), &whole)?;
        self.expect("scatter", || group.scatter((me == root).then_some(&whole), &meta, dim, sizes, root), &parts[me])?;
        self.expect("broadcast", || group.broadcast((me == root).then_some(&whole), &meta, root), &whole)?;
        for op in ops_of(dtype).into_iter().take(2) {
            let operands: Vec<Tensor> = (0..self.n()).map(|r| tensor(dtype, whole.dims(), 100 + r as u64)).collect();
            let start = sizes[..me].iter().sum();
            let expected = plain_reduce(op, &operands).narrow(dim, start, sizes[me])?;
            self.expect("reduce_scatter", || group.reduce_scatter(&operands[me], op, dim, sizes), &expected)?;
        }
        Ok(())
    }

    /// exchange_dims between all pairs of dimensions.
    fn exchanges(&mut self, dtype: DType, sizes: &[usize]) -> Result<()> {
        let (group, me) = (self.group, self.group.rank());
        let other: Vec<usize> = (0..self.n()).map(|r| (r + 1) % 3).collect();
        for (from, to) in [(0, 1), (1, 0), (2, 0), (1, 2)] {
            let mut shape = [2, 2, 2];
            (shape[from], shape[to]) = (sizes.iter().sum(), other.iter().sum());
            let whole = tensor(dtype, &shape, 7);
            let piece = |dim: usize, sizes: &[usize]| whole.narrow(dim, sizes[..me].iter().sum(), sizes[me]);
            let (before, after) = (piece(from, sizes)?, piece(to, &other)?);
            self.expect("exchange_dims", || group.exchange_dims(&before, from, sizes, to, &other), &after)?;
        }
        Ok(())
    }

    /// all_reduce and reduce with every operation, on no, few and many elements.
    fn reductions(&mut self, dtype: DType) -> Result<()> {
        let (group, me) = (self.group, self.group.rank());
        for op in ops_of(dtype) {
            for shape in [&[][..], &[5], &[0, 3], &[3, 7], &[97, 211]] {
                let operands: Vec<Tensor> = (0..self.n()).map(|r| tensor(dtype, shape, r as u64)).collect();
                let expected = plain_reduce(op, &operands);
                self.expect("all_reduce", || group.all_reduce(&operands[me], op), &expected)?;
                let root = shape.len() % self.n();
                self.expect_at(root, "reduce", || group.reduce(&operands[me], op, root), &expected)?;
                if shape.len() == 2 {
                    self.expect("all_reduce", || group.all_reduce(&strided(&operands[me]), op), &expected)?;
                }
            }
        }
        Ok(())
    }

    /// all_to_all with another shape for every pair of ranks.
    fn all_to_all(&mut self, dtype: DType) -> Result<()> {
        let (group, me, n) = (self.group, self.group.rank(), self.n());
        let piece = |from: usize, to: usize| tensor(dtype, &[from % 3, to + 1], (from * n + to) as u64);
        let pieces: Vec<Tensor> = (0..n).map(|to| piece(me, to)).collect();
        let expected: Vec<Tensor> = (0..n).map(|from| piece(from, me)).collect();
        let metas: Vec<TensorMeta> = expected.iter().map(|t| TensorMeta::new(t.dims(), dtype)).collect();
        for _ in 0..2 {
            let got = group.all_to_all(&pieces, &metas)?;
            assert_eq!(got.len(), n);
            for (got, expected) in got.iter().zip(&expected) {
                assert_same("all_to_all", got, expected);
            }
        }
        self.checked += 1;
        Ok(())
    }

    /// send and recv around the ring, received in another order than sent, and from a rank to itself.
    fn messages(&mut self, dtype: DType) -> Result<()> {
        let (group, me, n) = (self.group, self.group.rank(), self.n());
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        let message = |from: usize, tag: u64| tensor(dtype, &[from, 2 + tag as usize], tag + 10 * from as u64);
        for tag in 0..3 {
            group.send(&message(me, tag), next, tag)?;
        }
        for tag in [2, 0, 1] {
            let expected = message(previous, tag);
            let got = group.recv(&TensorMeta::new(expected.dims(), dtype), previous, tag)?;
            assert_same("recv", &got, &expected);
        }
        group.send(&message(me, 5), me, 9)?;
        assert_same("recv", &group.recv(&TensorMeta::new((me, 7), dtype), me, 9)?, &message(me, 5));
        self.checked += 4;
        Ok(())
    }

    fn expect(&mut self, what: &str, collective: impl Fn() -> Result<Tensor>, expected: &Tensor) -> Result<()> {
        for _ in 0..2 {
            assert_same(what, &collective()?, expected);
        }
        self.checked += 1;
        Ok(())
    }

    fn expect_at(
        &mut self,
        root: usize,
        what: &str,
        collective: impl Fn() -> Result<Option<Tensor>>,
        expected: &Tensor,
    ) -> Result<()> {
        match collective()? {
            Some(got) if self.group.rank() == root => assert_same(what, &got, expected),
            None if self.group.rank() != root => {}
            other => panic!("{what} gave {other:?} to rank {} with root {root}", self.group.rank()),
        }
        self.checked += 1;
        Ok(())
    }
}

/// The reductions that a type supports.
fn ops_of(dtype: DType) -> Vec<ReduceOp> {
    ReduceOp::ALL.into_iter().chain([ReduceOp::LogSumExp]).filter(|op| op.supports(dtype)).collect()
}

/// Pseudo-random elements that use the full precision of the type.
fn tensor(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0xD1B5_4A32_D192_ED03);
    let mut next = move || {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0;
    let cpu = &Device::Cpu;
    let tensor = match dtype {
        DType::F64 => Tensor::from_vec((0..count).map(|_| unit(next())).collect::<Vec<f64>>(), shape, cpu),
        DType::F32 => Tensor::from_vec((0..count).map(|_| unit(next()) as f32).collect::<Vec<_>>(), shape, cpu),
        DType::F16 => Tensor::from_vec((0..count).map(|_| f16::from_f64(unit(next()))).collect::<Vec<_>>(), shape, cpu),
        DType::BF16 => {
            Tensor::from_vec((0..count).map(|_| bf16::from_f64(unit(next()))).collect::<Vec<_>>(), shape, cpu)
        }
        DType::I64 => Tensor::from_vec((0..count).map(|_| next() as i64).collect::<Vec<_>>(), shape, cpu),
        DType::I32 => Tensor::from_vec((0..count).map(|_| next() as i32).collect::<Vec<_>>(), shape, cpu),
        DType::I16 => Tensor::from_vec((0..count).map(|_| next() as i16).collect::<Vec<_>>(), shape, cpu),
        DType::U32 => Tensor::from_vec((0..count).map(|_| next() as u32).collect::<Vec<_>>(), shape, cpu),
        _ => Tensor::from_vec((0..count).map(|_| next() as u8).collect::<Vec<_>>(), shape, cpu),
    };
    tensor.expect("as many elements as the shape has")
}

/// The same values with other strides in memory.
fn strided(t: &Tensor) -> Tensor {
    let last = t.rank() - 1;
    let turned = t.transpose(0, last).unwrap().contiguous().unwrap();
    turned.transpose(0, last).unwrap()
}

/// Concatenates along `dim` with explicit index arithmetic.
fn plain_cat(parts: &[Tensor], dim: usize) -> Tensor {
    let outer: usize = parts[0].dims()[..dim].iter().product();
    let mut bytes = Vec::new();
    for o in 0..outer {
        for part in parts {
            let run: usize = part.dims()[dim..].iter().product::<usize>() * part.dtype().size_in_bytes();
            bytes.extend(&raw(part)[o * run..(o + 1) * run]);
        }
    }
    let mut shape = parts[0].dims().to_vec();
    shape[dim] = parts.iter().map(|p| p.dims()[dim]).sum();
    Tensor::from_raw_buffer(&bytes, parts[0].dtype(), &shape, &Device::Cpu).unwrap()
}

/// Reduces the operands in rank order: half precision in f32, rounded once.
fn plain_reduce(op: ReduceOp, operands: &[Tensor]) -> Tensor {
    let n = operands.len();
    let shape = operands[0].dims();
    macro_rules! fold {
        ($T:ty, $Wide:ty, $widen:expr, $narrow:expr, $combine:expr, $finish:expr) => {{
            let all: Vec<Vec<$T>> = operands.iter().map(|t| t.flatten_all().unwrap().to_vec1().unwrap()).collect();
            let reduced: Vec<$T> = (0..all[0].len())
                .map(|i| {
                    let first: $Wide = $widen(all[0][i]);
                    $narrow($finish(all[1..].iter().fold(first, |a, o| $combine(a, $widen(o[i])))))
                })
                .collect();
            Tensor::from_vec(reduced, shape, &Device::Cpu).unwrap()
        }};
    }
    macro_rules! float {
        ($T:ty, $Wide:ty, $widen:expr, $narrow:expr) => {
            fold!(
                $T,
                $Wide,
                $widen,
                $narrow,
                |a: $Wide, b: $Wide| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::LogSumExp => a.max(b) + (a.min(b) - a.max(b)).exp().ln_1p(),
                    _ => unreachable!(),
                },
                |a: $Wide| if op == ReduceOp::Avg { a / n as $Wide } else { a }
            )
        };
    }
    macro_rules! integer {
        ($T:ty) => {
            fold!(
                $T,
                $T,
                |x| x,
                |x| x,
                |a: $T, b: $T| match op {
                    ReduceOp::Sum => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                    ReduceOp::Avg | ReduceOp::LogSumExp => unreachable!(),
                },
                |x| x
            )
        };
    }
    match operands[0].dtype() {
        DType::F64 => float!(f64, f64, |x| x, |x| x),
        DType::F32 => float!(f32, f32, |x| x, |x| x),
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32),
        DType::BF16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::I64 => integer!(i64),
        DType::I32 => integer!(i32),
        DType::I16 => integer!(i16),
        DType::U32 => integer!(u32),
        _ => integer!(u8),
    }
}

/// The bytes of a tensor in row-major order.
fn raw(t: &Tensor) -> Vec<u8> {
    if t.elem_count() == 0 {
        return Vec::new(); // candle cannot read a view without elements
    }
    let t = t.flatten_all().unwrap().contiguous().unwrap();
    macro_rules! bytes {
        ($T:ty) => {
            t.to_vec1::<$T>().unwrap().into_iter().flat_map(|x| x.to_ne_bytes()).collect()
        };
    }
    match t.dtype() {
        DType::F64 => bytes!(f64),
        DType::F32 => bytes!(f32),
        DType::F16 => bytes!(f16),
        DType::BF16 => bytes!(bf16),
        DType::I64 => bytes!(i64),
        DType::I32 => bytes!(i32),
        DType::I16 => bytes!(i16),
        DType::U32 => bytes!(u32),
        _ => bytes!(u8),
    }
}

fn assert_same(what: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dtype(), expected.dtype(), "{what}");
    assert_eq!(got.dims(), expected.dims(), "{what} of {:?}", expected.dtype());
    assert!(raw(got) == raw(expected), "{what} of {:?} {:?}: got {got}, expected {expected}", got.dtype(), got.dims());
}
