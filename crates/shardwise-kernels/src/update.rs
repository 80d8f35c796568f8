//! Steps of optimizers: a new parameter from the old one, its gradient and a state that is changed in place, all in one
//! pass over memory.

use std::array::from_fn;
use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::convert::{Block, Compute};
use super::fresh::Fresh;
use super::{check_served, dense, first_element, vector};
use crate::error::Result;

/// Elements worked on at a time: few enough that all buffers stay in the first-level cache.
const CHUNK: usize = 512;

/// Elements that are computed together; a multiple of the length of every processor's vectors.
const LANES: usize = 16;

/// How one element of a parameter changes, with `K` numbers of state.
///
/// Computed in f64 whatever the types of the tensors are: memory bandwidth is the limit, and decay rates close to 1 are not
/// rounded. A closure `|p: f64, g: f64, [m]: [f64; 1]| (p - lr * m, [m])` is one. A type that implements it should mark
/// `update` as `#[inline(always)]`: the loop around it is compiled for several instruction sets, and only what is inlined
/// is compiled with it.
pub trait Elementwise<const K: usize>: Copy {
    /// Returns the new element and its new state, from the element, its gradient and its state.
    fn update(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]);
}

impl<F, const K: usize> Elementwise<K> for F
where
    F: Fn(f64, f64, [f64; K]) -> (f64, [f64; K]) + Copy,
{
    #[inline(always)]
    fn update(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]) {
        self(p, g, state)
    }
}

/// A type in which a state is kept.
pub trait Stored: WithDType {
    /// The number in f64.
    fn wide(self) -> f64;

    /// The nearest number of this type.
    fn narrow(x: f64) -> Self;

    /// Reads elements that follow each other into a buffer of their number.
    ///
    /// # Safety
    /// The elements are of the type and can be read at `first`.
    unsafe fn load(dtype: DType, first: *const u8, buffer: &mut [MaybeUninit<Self>]);

    /// Writes numbers one after the other.
    ///
    /// # Safety
    /// As many elements of the type can be written at `first`.
    unsafe fn store(dtype: DType, numbers: &[Self], first: *mut u8);
}

macro_rules! stored {
    ($($S:ty),*) => {$(
        impl Stored for $S {
            #[inline(always)]
            fn wide(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn narrow(x: f64) -> Self {
                x as $S
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
stored!(f32, f64);

/// The new parameter; the state changes in place. Parameter and gradient have one shape and any floating-point types, the
/// vectors of the state have as many elements. Of a parameter whose type is too coarse to hold small changes, `master` is a
/// finer copy; where the parameter is not that copy rounded, somebody else has set it, and its value counts.
pub fn update<S: Stored, U: Elementwise<K>, const K: usize>(
    rule: U,
    p: &Tensor,
    g: &Tensor,
    mut state: [&mut [S]; K],
    mut master: Option<&mut [S]>,
) -> Result<Tensor> {
    check_served(p)?;
    check_served(g)?;
    // Memory outside the gradient would be read otherwise.
    assert_eq!(p.dims(), g.dims());
    let (p, g) = (dense(p)?, dense(g)?);
    let (dtype, count) = (p.dtype(), p.elem_count());
    let output = Fresh::new(dtype, count)?;
    let (p_guard, g_guard) = (p.storage_and_layout(), g.storage_and_layout());
    let (p_first, g_first) = (first_element(&p_guard.0, p_guard.1).0, first_element(&g_guard.0, g_guard.1).0);
    let mut buffers = [[MaybeUninit::<S>::uninit(); CHUNK]; 3];
    for start in (0..count).step_by(CHUNK) {
        let n = CHUNK.min(count - start);
        let [p_buffer, g_buffer, results] = &mut buffers;
        // SAFETY: both tensors are dense and the guards keep them; the range lies inside, and a buffer holds it.
        let (mut p_chunk, g_chunk) = unsafe {
            let p_at = p_first.add(start * dtype.size_in_bytes());
            let g_at = g_first.add(start * g.dtype().size_in_bytes());
            (read(dtype, p_at, &mut p_buffer[..n]), read(g.dtype(), g_at, &mut g_buffer[..n]))
        };
        let merged;
        if let Some(master) = &master {
            merged = unrounded(p_chunk, &master[start..start + n], dtype);
            p_chunk = &merged[..n];
        }
        let mut each = state.iter_mut();
        let state = from_fn(|_| &mut each.next().expect("one per number")[start..start + n]);
        // SAFETY: the output has room for all elements, and the range lies inside.
        unsafe {
            let to = output.first().add(start * dtype.size_in_bytes());
            if dtype == S::DTYPE {
                let out = std::slice::from_raw_parts_mut(to.cast(), n);
                vector::run(Step { rule, p: p_chunk, g: g_chunk, state, out });
            } else {
                vector::run(Step { rule, p: p_chunk, g: g_chunk, state, out: &mut results[..n] });
                let results = results[..n].assume_init_ref();
                S::store(dtype, results, to);
                if let Some(master) = &mut master {
                    master[start..start + n].copy_from_slice(results);
                }
            }
        }
    }
    // SAFETY: the chunks cover all elements.
    Ok(unsafe { output.finish(p.dims()) })
}

/// Elements where they lie if they are of the type, else converted into a buffer of their number.
///
/// # Safety
/// The elements can be read at `first`, one after the other, for as long as the buffer lives.
pub(super) unsafe fn read<S: Stored>(dtype: DType, first: *const u8, buffer: &mut [MaybeUninit<S>]) -> &[S] {
    // SAFETY: the caller's promise; `load` writes the whole buffer.
    unsafe {
        if dtype == S::DTYPE {
            return std::slice::from_raw_parts(first.cast(), buffer.len());
        }
        S::load(dtype, first, buffer);
        buffer.assume_init_ref()
    }
}

/// The finer copy where its rounding is the parameter, else the parameter.
fn unrounded<S: Stored>(p: &[S], master: &[S], dtype: DType) -> [S; CHUNK] {
    let n = p.len();
    let mut merged = [S::narrow(0.0); CHUNK];
    let mut coarse = [0u64; CHUNK];
    let mut rounded = [MaybeUninit::<S>::uninit(); CHUNK];
    // SAFETY: `coarse` has room for as many elements of any type, and `rounded` for those that are read back.
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

struct Step<'a, S, U, const K: usize> {
    rule: U,
    p: &'a [S],
    g: &'a [S],
    state: [&'a mut [S]; K],
    out: &'a mut [MaybeUninit<S>],
}

impl<S: Stored, U: Elementwise<K>, const K: usize> vector::Kernel for Step<'_, S, U, K> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Step { rule, p, g, mut state, out } = self;
        let whole = out.len() / LANES * LANES;
        blocks::<S, U, K, LANES>(rule, p, g, state.each_mut().map(|s| &mut **s), out);
        blocks::<S, U, K, 1>(rule, &p[whole..], &g[whole..], state.map(|s| &mut s[whole..]), &mut out[whole..]);
    }
}

/// All whole blocks of `L` elements. In arrays of a known length they cannot overlap and need no checks, so that they become vectors.
#[inline(always)]
fn blocks<S: Stored, U: Elementwise<K>, const K: usize, const L: usize>(
    rule: U,
    p: &[S],
    g: &[S],
    state: [&mut [S]; K],
    out: &mut [MaybeUninit<S>],
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
            let (p, s) = rule.update(p[i][j].wide(), g[i][j].wide(), from_fn(|k| before[k][j].wide()));
            new[j] = S::narrow(p);
            (0..K).for_each(|k| after[k][j] = S::narrow(s[k]));
        }
        out[i] = new.map(MaybeUninit::new);
        (0..K).for_each(|k| state[k][i] = after[k]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use half::bf16;

    /// Adds gradients up, and their squares.
    #[derive(Clone, Copy)]
    struct Adds;

    impl Elementwise<2> for Adds {
        #[inline(always)]
        fn update(self, p: f64, g: f64, [a, b]: [f64; 2]) -> (f64, [f64; 2]) {
            (p - g * 0.25, [a + g, b + g * g])
        }
    }

    #[test]
    fn every_element_changes_once_whatever_the_length_and_type() {
        for n in [0, 1, 15, 16, 17, 511, 512, 513, 1100] {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let g = Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap();
                let p = (&g * 0.5).unwrap().to_dtype(dtype).unwrap();
                let g = g.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
                let (mut a, mut b) = (vec![1f32; n], vec![2f32; n]);
                let new = update(Adds, &p, &g, [&mut a, &mut b], None).unwrap();
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
    fn a_finer_copy_keeps_what_rounding_would_lose_until_the_parameter_is_set() {
        let full = |x: f32| Tensor::full(bf16::from_f32(x), 600, &Device::Cpu).unwrap();
        let g = Tensor::full(0.001f32, 600, &Device::Cpu).unwrap();
        let (mut a, mut b, mut master) = (vec![0f32; 600], vec![0f32; 600], vec![1f32; 600]);
        let mut p = full(1.0);
        for _ in 0..100 {
            p = update(Adds, &p, &g, [&mut a, &mut b], Some(&mut master)).unwrap();
        }
        assert!(master.iter().all(|m| (m - 0.975).abs() < 1e-5), "{}", master[0]);
        assert!(p.to_vec1::<bf16>().unwrap().iter().all(|p| p.to_f32() == 0.9765625));
        update(Adds, &full(3.0), &g, [&mut a, &mut b], Some(&mut master)).unwrap();
        assert!(master.iter().all(|&m| m == 3.0 - 0.00025));
    }
}
