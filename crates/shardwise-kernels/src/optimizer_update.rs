//! Elementwise optimizer steps in one pass over memory: a new parameter from the old one, its gradient and the optimizer
//! state, which is updated in place. What PyTorch calls a fused optimizer.

use std::array::from_fn;
use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::convert::{Block, Compute};
use super::parallel::{SharedPtr, over_ranges};
use super::stream;
use super::uninit_buffer::UninitBuffer;
use super::{check_supported, contiguous, first_element, simd};
use crate::error::Result;

/// Elements per block: the three buffers of f64 take 12 KiB and stay in the first-level cache.
const CHUNK: usize = 512;

/// Elements computed together; a multiple of the vector length of every processor.
const LANES: usize = 16;

/// Elements of a parameter that is stored past the caches. A model with such parameters does not stay in the cache during a step,
/// because its state takes three times as much; that of small ones may.
const MIN_STREAMED: usize = 1 << 18;

/// Update rule of an elementwise optimizer: how one element of a parameter changes, with `K` state tensors (2 for Adam).
///
/// Computed in f64 unless [`update_f32`](Self::update_f32) says otherwise: decay rates close to 1 are not rounded. A closure `|p: f64, g: f64, [m]: [f64; 1]| (p - lr * m, [m])` is an update rule. A type that implements it
/// should mark `update` as `#[inline(always)]`: the loop around it is compiled for several instruction sets, and only what is
/// inlined is compiled with it.
pub trait Elementwise<const K: usize>: Copy + Sync {
    /// Returns the new element and its new state, given the element `p`, its gradient `g` and its state.
    fn update(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]);

    /// As [`update`](Self::update), for state in f32. By default it converts to f64 and rounds the results; a rule whose
    /// divisions and roots are exact enough in f32 computes those in f32, where they take a quarter of the time.
    #[inline(always)]
    fn update_f32(self, p: f32, g: f32, state: [f32; K]) -> (f32, [f32; K]) {
        let (p, state) = self.update(p.into(), g.into(), state.map(f64::from));
        (p as f32, state.map(|x| x as f32))
    }
}

impl<F, const K: usize> Elementwise<K> for F
where
    F: Fn(f64, f64, [f64; K]) -> (f64, [f64; K]) + Copy + Sync,
{
    #[inline(always)]
    fn update(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]) {
        self(p, g, state)
    }
}

/// Element type of optimizer state and master weights: f32 or f64.
pub trait StateElement: WithDType {
    /// Converts to f64.
    fn wide(self) -> f64;

    /// Rounds to this type.
    fn narrow(x: f64) -> Self;

    /// Applies an update rule in this type.
    fn apply<U: Elementwise<K>, const K: usize>(rule: U, p: Self, g: Self, state: [Self; K]) -> (Self, [Self; K]);

    /// Converts contiguous elements of `dtype` into a buffer.
    ///
    /// # Safety
    /// As many elements of type `dtype` as the buffer has can be read at `first`.
    unsafe fn load(dtype: DType, first: *const u8, buffer: &mut [MaybeUninit<Self>]);

    /// Converts numbers to `dtype` and writes them one after the other.
    ///
    /// # Safety
    /// As many elements of type `dtype` can be written at `first`.
    unsafe fn store(dtype: DType, numbers: &[Self], first: *mut u8);
}

macro_rules! state_elements {
    ($($S:ty: $update:ident),*) => {$(
        impl StateElement for $S {
            #[inline(always)]
            fn wide(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn narrow(x: f64) -> Self {
                x as $S
            }

            #[inline(always)]
            fn apply<U: Elementwise<K>, const K: usize>(rule: U, p: $S, g: $S, state: [$S; K]) -> ($S, [$S; K]) {
                rule.$update(p, g, state)
            }

            unsafe fn load(dtype: DType, first: *const u8, buffer: &mut [MaybeUninit<Self>]) {
                let block = Block { rows: 1, row_stride: 0, width: buffer.len(), stride: 1 };
                // SAFETY: the caller's promise.
                unsafe { <$S as Compute>::load(dtype, first, block, buffer) };
            }

            unsafe fn store(dtype: DType, numbers: &[Self], first: *mut u8) {
                // SAFETY: the caller's promise.
                unsafe { <$S as Compute>::store(dtype, numbers, first) };
            }
        }
    )*};
}
state_elements!(f32: update_f32, f64: update);

/// Applies an update rule to every element and returns the new parameter; the state is updated in place.
///
/// The parameter `p` and the gradient `g` have one shape and any floating-point types; every slice of `state`, and `master`,
/// has as many elements. Large parameters are divided over the threads of the pool.
///
/// `master` is a master copy in higher precision of a parameter in f16 or bf16, which would lose small updates. Where the
/// parameter is not the master copy rounded, a program has assigned to the parameter, and the update starts from the
/// assigned value.
///
/// # Panics
/// If the shapes differ or a slice is too short.
pub fn elementwise_update<S: StateElement, U: Elementwise<K>, const K: usize>(
    rule: U,
    p: &Tensor,
    g: &Tensor,
    state: [&mut [S]; K],
    master: Option<&mut [S]>,
) -> Result<Tensor> {
    check_supported(p)?;
    check_supported(g)?;
    // Otherwise memory outside the gradient or the state would be read.
    assert_eq!(p.dims(), g.dims());
    let (p, g) = (contiguous(p)?, contiguous(g)?);
    let (dtype, count) = (p.dtype(), p.elem_count());
    assert!(state.iter().all(|s| s.len() == count) && master.as_ref().is_none_or(|m| m.len() == count));
    let output = UninitBuffer::new(dtype, count)?;
    let (p_guard, g_guard) = (p.storage_and_layout(), g.storage_and_layout());
    let [p_first, g_first] =
        [&p_guard, &g_guard].map(|guard| SharedPtr::new(first_element(&guard.0, guard.1).0.cast_mut()));
    let state = state.map(|s| SharedPtr::new(s.as_mut_ptr()));
    let master = master.map(|m| SharedPtr::new(m.as_mut_ptr()));
    let out_first = SharedPtr::new(output.first());
    let update = |chunk: usize| {
        let start = chunk * CHUNK;
        let n = CHUNK.min(count - start);
        let mut buffers = [[MaybeUninit::<S>::uninit(); CHUNK]; 3];
        let [p_buffer, g_buffer, results] = &mut buffers;
        // SAFETY: all memory has `count` elements, of which no other chunk has these; the guards keep the tensors, and a
        // buffer holds a chunk.
        unsafe {
            let p_at = p_first.get().add(start * dtype.size_in_bytes());
            let g_at = g_first.get().add(start * g.dtype().size_in_bytes());
            let (mut p_chunk, g_chunk) =
                (read(dtype, p_at, &mut p_buffer[..n]), read(g.dtype(), g_at, &mut g_buffer[..n]));
            let mut master = master.map(|m| std::slice::from_raw_parts_mut(m.get().add(start), n));
            let merged;
            if let Some(master) = &master {
                merged = with_master(p_chunk, master, dtype);
                p_chunk = &merged[..n];
            }
            let state = state.map(|s| std::slice::from_raw_parts_mut(s.get().add(start), n));
            let to = out_first.get().add(start * dtype.size_in_bytes());
            if dtype == S::DTYPE {
                let out = std::slice::from_raw_parts_mut(to.cast(), n);
                let is_streamed = count >= MIN_STREAMED;
                simd::run(UpdateBlock { rule, p: p_chunk, g: g_chunk, state, out, is_streamed });
            } else {
                let out = &mut results[..n];
                simd::run(UpdateBlock { rule, p: p_chunk, g: g_chunk, state, out, is_streamed: false });
                let results = results[..n].assume_init_ref();
                S::store(dtype, results, to);
                if let Some(master) = &mut master {
                    master.copy_from_slice(results);
                }
            }
        }
    };
    // An element reads and writes about seven numbers in memory.
    over_ranges(count.div_ceil(CHUNK), 8 * CHUNK, 1, |chunks| {
        chunks.for_each(update);
        stream::finish();
    });
    // SAFETY: the chunks cover all elements.
    Ok(unsafe { output.finish(p.dims()) })
}

/// Returns contiguous elements in place if they have type `S`, else converted into the buffer, whose length is their number.
///
/// # Safety
/// The elements can be read at `first` for as long as the buffer lives.
pub(super) unsafe fn read<S: StateElement>(dtype: DType, first: *const u8, buffer: &mut [MaybeUninit<S>]) -> &[S] {
    // SAFETY: the caller's promise; `load` writes the whole buffer.
    unsafe {
        if dtype == S::DTYPE {
            return std::slice::from_raw_parts(first.cast(), buffer.len());
        }
        S::load(dtype, first, buffer);
        buffer.assume_init_ref()
    }
}

/// The master copy where it rounds to the parameter, else the parameter, which a program has assigned.
fn with_master<S: StateElement>(p: &[S], master: &[S], dtype: DType) -> [S; CHUNK] {
    let n = p.len();
    let mut merged = [S::narrow(0.0); CHUNK];
    let mut coarse = [0u64; CHUNK];
    let mut rounded = [MaybeUninit::<S>::uninit(); CHUNK];
    // SAFETY: `coarse` has room for as many elements of any type, and `rounded` for the elements that are read back.
    let rounded = unsafe {
        S::store(dtype, master, coarse.as_mut_ptr().cast());
        S::load(dtype, coarse.as_ptr().cast(), &mut rounded[..n]);
        rounded[..n].assume_init_ref()
    };
    for (merged, ((&p, &rounded), &master)) in merged.iter_mut().zip(p.iter().zip(rounded).zip(master)) {
        *merged = if rounded == p { master } else { p };
    }
    merged
}

struct UpdateBlock<'a, S, U, const K: usize> {
    rule: U,
    p: &'a [S],
    g: &'a [S],
    state: [&'a mut [S]; K],
    out: &'a mut [MaybeUninit<S>],
    /// Whether the output is stored past the caches where that is possible.
    is_streamed: bool,
}

impl<S: StateElement, U: Elementwise<K>, const K: usize> simd::Kernel for UpdateBlock<'_, S, U, K> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let UpdateBlock { rule, p, g, mut state, out, is_streamed } = self;
        let whole = out.len() / LANES * LANES;
        let full = state.each_mut().map(|s| &mut **s);
        if is_streamed && stream::is_possible::<_, FMA>(out.as_ptr()) {
            blocks::<S, U, K, LANES>(rule, p, g, full, out, |new, to| {
                // SAFETY: the address is that of the output or a multiple of 64 bytes after it.
                unsafe { stream::store(new, to.as_mut_ptr().cast()) };
            });
        } else {
            blocks::<S, U, K, LANES>(rule, p, g, full, out, |new, to| *to = new.map(MaybeUninit::new));
        }
        let (p, g, state) = (&p[whole..], &g[whole..], state.map(|s| &mut s[whole..]));
        blocks::<S, U, K, 1>(rule, p, g, state, &mut out[whole..], |new, to| *to = new.map(MaybeUninit::new));
    }
}

/// Updates all full blocks of `L` elements, which `write` writes to the output. Arrays of a known length need no bounds checks and
/// cannot overlap, so that the loop becomes vector instructions.
#[inline(always)]
fn blocks<S: StateElement, U: Elementwise<K>, const K: usize, const L: usize>(
    rule: U,
    p: &[S],
    g: &[S],
    state: [&mut [S]; K],
    out: &mut [MaybeUninit<S>],
    write: impl Fn([S; L], &mut [MaybeUninit<S>; L]),
) {
    let n = out.len() / L;
    let (p, g) = (&p.as_chunks::<L>().0[..n], &g.as_chunks::<L>().0[..n]);
    let mut state = state.map(|s| &mut s.as_chunks_mut::<L>().0[..n]);
    let out = &mut out.as_chunks_mut::<L>().0[..n];
    for i in 0..n {
        let before: [[S; L]; K] = from_fn(|k| state[k][i]);
        let mut after = before;
        let mut new = p[i];
        for j in 0..L {
            let (p, s) = S::apply(rule, p[i][j], g[i][j], from_fn(|k| before[k][j]));
            new[j] = p;
            (0..K).for_each(|k| after[k][j] = s[k]);
        }
        write(new, &mut out[i]);
        (0..K).for_each(|k| state[k][i] = after[k]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use half::bf16;

    /// A step of 0.25, with the sums of gradients and of their squares as state.
    #[derive(Clone, Copy)]
    struct SumsOfGradients;

    impl Elementwise<2> for SumsOfGradients {
        #[inline(always)]
        fn update(self, p: f64, g: f64, [a, b]: [f64; 2]) -> (f64, [f64; 2]) {
            (p - g * 0.25, [a + g, b + g * g])
        }
    }

    #[test]
    fn every_element_is_updated_once_for_any_length_and_type() {
        for n in [0, 1, 15, 16, 17, 511, 512, 513, 1100] {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let g = Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap();
                let p = (&g * 0.5).unwrap().to_dtype(dtype).unwrap();
                let g = g.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
                let (mut a, mut b) = (vec![1f32; n], vec![2f32; n]);
                let new = elementwise_update(SumsOfGradients, &p, &g, [&mut a, &mut b], None).unwrap();
                assert_eq!((new.dtype(), new.dims()), (dtype, [n].as_slice()));
                let numbers = |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                if n > 0 {
                    let gradients = numbers(&g);
                    let fits = |(i, p): (usize, &f64)| (p - gradients[i] * 0.25).abs() <= p.abs() * 0.02;
                    assert!(numbers(&new).iter().enumerate().all(fits), "{dtype:?} {n}");
                    assert!((0..n).all(|i| a[i] == 1.0 + gradients[i] as f32), "{dtype:?} {n}");
                    assert!((0..n).all(|i| b[i] == 2.0 + (gradients[i] * gradients[i]) as f32), "{dtype:?} {n}");
                }
            }
        }
    }

    #[test]
    fn the_master_copy_keeps_what_rounding_loses_until_the_parameter_is_assigned() {
        let full = |x: f32| Tensor::full(bf16::from_f32(x), 600, &Device::Cpu).unwrap();
        let g = Tensor::full(0.001f32, 600, &Device::Cpu).unwrap();
        let (mut a, mut b, mut master) = (vec![0f32; 600], vec![0f32; 600], vec![1f32; 600]);
        let mut p = full(1.0);
        for _ in 0..100 {
            p = elementwise_update(SumsOfGradients, &p, &g, [&mut a, &mut b], Some(&mut master)).unwrap();
        }
        assert!(master.iter().all(|m| (m - 0.975).abs() < 1e-5), "{}", master[0]);
        assert!(p.to_vec1::<bf16>().unwrap().iter().all(|p| p.to_f32() == 0.9765625));
        elementwise_update(SumsOfGradients, &full(3.0), &g, [&mut a, &mut b], Some(&mut master)).unwrap();
        assert!(master.iter().all(|&m| m == 3.0 - 0.00025));
    }
}
