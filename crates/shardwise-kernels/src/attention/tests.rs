//! Attention in blocks against a softmax of all scores in f64, element by element.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::random::{RandomDraw, choice_bound, is_chosen};

use super::{
    AttentionArgs, AttentionBlocks, AttentionDropout, BlockMask, attention_backward, attention_forward, attention_part,
    merge_attention_parts, row_dots,
};

/// Sizes and options of one comparison.
#[derive(Debug, Clone, Default)]
struct Case {
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    size: usize,
    value_size: usize,
    causal: bool,
    window: Option<usize>,
    offset: isize,
    cap: Option<f64>,
    p: f64,
    /// Whether there is a mask by blocks.
    blocks: bool,
    /// 0: no mask; 1: added, for every score; 2: boolean, per key; 3: added, per query and key.
    mask: usize,
}

struct Data {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    mask: Vec<f64>,
}

fn random(seed: u64, count: usize) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

impl Case {
    fn rows(&self) -> usize {
        self.heads * self.groups * self.queries
    }

    fn data(&self) -> Data {
        let scores = self.rows() * self.keys;
        let per_key = random(5, self.keys).iter().map(|x| f64::from(u8::from(*x > -0.4))).collect();
        let mask = match self.mask {
            1 => random(4, scores),
            2 => per_key,
            3 => random(6, self.queries * self.keys),
            _ => Vec::new(),
        };
        Data {
            q: random(0, self.rows() * self.size),
            k: random(1, self.heads * self.keys * self.size),
            v: random(2, self.heads * self.keys * self.value_size),
            g: random(3, self.rows() * self.value_size),
            mask,
        }
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        let position = query as isize + self.offset;
        let late = self.causal && key as isize > position;
        let old = self.window.is_some_and(|window| (key as isize) < position - window as isize);
        !late && !old
    }

    /// Blocks that are seen, that are not, and that are seen in part, which differ by head.
    fn in_blocks(&self, head: usize, query: usize, key: usize) -> bool {
        let whole = (head + query / 64 + key / 128).is_multiple_of(2);
        !self.blocks || whole || query % 7 == head % 7 && key / 64 == 1
    }

    fn keeps(&self, row: usize, key: usize) -> f64 {
        if self.p == 0.0 {
            return 1.0;
        }
        let draw = RandomDraw { seed: 77, draw: 9 };
        let is_kept = is_chosen(draw, (row * self.keys + key) as u64, choice_bound(1.0 - self.p));
        if is_kept { 1.0 / (1.0 - self.p) } else { 0.0 }
    }

    /// Outputs, logarithms, and the gradients of queries, keys and values, from all scores.
    fn expected(&self, data: &Data) -> [Vec<f64>; 5] {
        let Case { groups, queries, keys, size, value_size, .. } = *self;
        let scale = 0.3;
        let mut out = vec![0.0; self.rows() * value_size];
        let mut logs = vec![f64::NEG_INFINITY; self.rows()];
        let (mut dq, mut dk, mut dv) = (vec![0.0; data.q.len()], vec![0.0; data.k.len()], vec![0.0; data.v.len()]);
        for row in 0..self.rows() {
            let (head, query) = (row / queries / groups, row % queries);
            let k = |key: usize| (head * keys + key) * size;
            let v = |key: usize| (head * keys + key) * value_size;
            let mut scores = vec![f64::NEG_INFINITY; keys];
            let mut slopes = vec![1.0; keys];
            let sees = |key: &usize| self.sees(query, *key) && self.in_blocks(row / queries, query, *key);
            for key in (0..keys).filter(sees) {
                let mut score = scale * (0..size).map(|d| data.q[row * size + d] * data.k[k(key) + d]).sum::<f64>();
                if let Some(cap) = self.cap {
                    slopes[key] = 1.0 - (score / cap).tanh().powi(2);
                    score = cap * (score / cap).tanh();
                }
                scores[key] = score
                    + match self.mask {
                        1 => data.mask[row * keys + key],
                        2 => data.mask[key].ln(),
                        3 => data.mask[query * keys + key],
                        _ => 0.0,
                    };
            }
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if highest == f64::NEG_INFINITY {
                continue;
            }
            logs[row] = highest + scores.iter().map(|s| (s - highest).exp()).sum::<f64>().ln();
            let g = &data.g[row * value_size..(row + 1) * value_size];
            let p: Vec<f64> = scores.iter().map(|s| (s - logs[row]).exp()).collect();
            for key in 0..keys {
                for d in 0..value_size {
                    let kept = p[key] * self.keeps(row, key);
                    out[row * value_size + d] += kept * data.v[v(key) + d];
                    dv[v(key) + d] += kept * g[d];
                }
            }
            let dot: f64 = (0..value_size).map(|d| out[row * value_size + d] * g[d]).sum();
            for key in 0..keys {
                let dp: f64 = (0..value_size).map(|d| data.v[v(key) + d] * g[d]).sum();
                let ds = scale * slopes[key] * p[key] * (dp * self.keeps(row, key) - dot);
                for d in 0..size {
                    dq[row * size + d] += ds * data.k[k(key) + d];
                    dk[k(key) + d] += ds * data.q[row * size + d];
                }
            }
        }
        [out, logs, dq, dk, dv]
    }

    /// The same from the kernels; keys and values are transposed in memory if `strided`.
    fn computed(&self, data: &Data, dtype: DType, strided: bool) -> [Tensor; 5] {
        let Case { heads, groups, queries, keys, size, value_size, .. } = *self;
        let tensor = |values: &[f64], shape: &[usize]| {
            Tensor::from_slice(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
        };
        let turned = |t: Tensor| match strided {
            true => t.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap(),
            false => t,
        };
        let query_shape =
            |size| if groups != 1 { vec![heads, groups, queries, size] } else { vec![heads, queries, size] };
        let q = tensor(&data.q, &query_shape(size));
        let (k, v) =
            (turned(tensor(&data.k, &[heads, keys, size])), turned(tensor(&data.v, &[heads, keys, value_size])));
        let g = tensor(&data.g, &query_shape(value_size));
        let mask = match self.mask {
            1 => Some(tensor(&data.mask, &query_shape(keys))),
            2 => Some(tensor(&data.mask, &[1, keys]).to_dtype(DType::U8).unwrap()),
            3 => Some(tensor(&data.mask, &[queries, keys])),
            _ => None,
        };
        let (query_indices, key_indices): (Vec<usize>, Vec<usize>) = ((0..queries).collect(), (0..keys).collect());
        let all_heads: Vec<u64> = (0..(heads * groups) as u64).collect();
        let dropout = AttentionDropout { p: self.p, seed: 77, draw: 9, heads: &all_heads, queries, keys };
        let count = heads * groups;
        let blocks =
            BlockMask::from_fn([1, count, queries, keys], |_, head, query, key| self.in_blocks(head, query, key));
        let blocks = AttentionBlocks { mask: &blocks, heads: &all_heads, heads_per_batch: count };
        let args = AttentionArgs {
            scale: 0.3,
            soft_cap: self.cap,
            causal: self.causal,
            window: self.window,
            query_offset: self.offset,
            queries: &query_indices,
            keys: &key_indices,
            mask: mask.as_ref(),
            blocks: self.blocks.then_some(blocks),
            dropout: (self.p > 0.0).then_some(dropout),
        };
        let (out, logs) = attention_forward([&q, &k, &v], dtype, &args).unwrap();
        let dots = row_dots(&out, &g).unwrap();
        let d = attention_backward([&q, &k, &v], &g, [&logs, &dots], [dtype; 3], &args).unwrap();
        [out, logs, d.queries, d.keys, d.values]
    }
}

fn numbers(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn cases() -> Vec<Case> {
    let small = Case { heads: 2, groups: 1, queries: 5, keys: 7, size: 3, value_size: 2, ..Case::default() };
    let long = Case { heads: 1, groups: 1, queries: 150, keys: 301, size: 40, value_size: 33, ..Case::default() };
    let grouped = Case { heads: 2, groups: 3, queries: 70, keys: 70, size: 64, value_size: 64, ..Case::default() };
    vec![
        small.clone(),
        Case { causal: true, ..small.clone() },
        // the first two queries see nothing
        Case { causal: true, offset: -2, window: Some(1), ..small.clone() },
        Case { mask: 2, cap: Some(0.7), p: 0.4, ..small },
        long.clone(),
        Case { causal: true, offset: 151, window: Some(140), mask: 3, ..long.clone() },
        Case { mask: 1, p: 0.1, cap: Some(0.5), ..long.clone() },
        Case { blocks: true, ..long.clone() },
        Case { blocks: true, causal: true, offset: 100, mask: 3, ..long },
        Case { causal: true, ..grouped.clone() },
        Case { causal: true, mask: 1, window: Some(9), p: 0.3, ..grouped.clone() },
        Case { blocks: true, p: 0.2, ..grouped.clone() },
        // What a rank without query heads, queries, keys or key heads has.
        Case { groups: 0, causal: true, ..grouped.clone() },
        Case { queries: 0, ..grouped.clone() },
        Case { keys: 0, ..grouped.clone() },
        Case { heads: 0, ..grouped },
    ]
}

#[test]
fn blocks_give_the_softmax_of_all_scores_and_its_gradients() {
    for case in cases() {
        let data = case.data();
        let expected = case.expected(&data);
        for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 0.06), (DType::F16, 0.01)] {
            for strided in [false, true] {
                let computed = case.computed(&data, dtype, strided);
                for (name, (expected, computed)) in
                    ["out", "logs", "dq", "dk", "dv"].iter().zip(expected.iter().zip(&computed))
                {
                    let computed = numbers(computed);
                    let worst = computed
                        .iter()
                        .zip(expected)
                        .map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() / (1.0 + y.abs()) });
                    let worst = worst.fold(0.0, |a: f64, b| if b <= a { a } else { b });
                    assert!(worst <= bound, "{name} in {dtype:?} of {case:?}: {worst:e}");
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // One key head on several threads takes separate passes for queries and keys; 16 heads take one.
    for heads in [1, 16] {
        let case = Case {
            heads,
            groups: 2,
            queries: 300,
            keys: 300,
            size: 32,
            value_size: 32,
            causal: true,
            ..Case::default()
        };
        let data = case.data();
        let bits = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| case.computed(&data, DType::F32, false)).map(|t| numbers(&t))
        };
        let one = bits(1);
        for threads in [2, 4] {
            assert_eq!(bits(threads), one, "{heads} heads on {threads} threads");
        }
    }
}

#[test]
fn parts_of_the_keys_merge_to_the_whole() {
    let case =
        Case { heads: 2, groups: 1, queries: 40, keys: 50, size: 8, value_size: 8, causal: true, ..Case::default() };
    let data = case.data();
    let whole = case.expected(&data);
    let tensor = |values: &[f64], length: usize| Tensor::from_slice(values, (2, length, 8), &Device::Cpu).unwrap();
    let (q, k, v) = (tensor(&data.q, 40), tensor(&data.k, 50), tensor(&data.v, 50));
    let queries: Vec<usize> = (0..40).collect();
    let part = |keys: Vec<usize>| {
        let index = Tensor::from_iter(keys.iter().map(|&i| i as u32), &Device::Cpu).unwrap();
        let args = AttentionArgs {
            scale: 0.3,
            soft_cap: None,
            causal: true,
            window: None,
            query_offset: 0,
            queries: &queries,
            keys: &keys,
            mask: None,
            blocks: None,
            dropout: None,
        };
        let select = |t: &Tensor| t.index_select(&index, 1).unwrap();
        attention_part([&q, &select(&k), &select(&v)], DType::F64, &args).unwrap()
    };
    // Strided keys, keys that no query sees, and no keys.
    let parts = [part((0..50).step_by(2).collect()), part((1..50).step_by(2).collect()), part(Vec::new())];
    let stack = |which: usize| Tensor::stack(&parts.iter().map(|p| &p[which]).collect::<Vec<_>>(), 0).unwrap();
    let (outputs, maxima, sums) = (stack(0), stack(1), stack(2));
    let weights = (maxima.broadcast_sub(&maxima.max(0).unwrap()).unwrap().exp().unwrap() * &sums).unwrap();
    let weights = weights.broadcast_div(&weights.sum(0).unwrap()).unwrap();
    let merged = merge_attention_parts(&outputs, &weights).unwrap();
    for (x, y) in numbers(&merged).iter().zip(&whole[0]) {
        assert!((x - y).abs() < 1e-12, "{x} and not {y}");
    }
}
