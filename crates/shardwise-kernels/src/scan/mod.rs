//! Cumulative sums, products, maxima and minima along a dimension, and their gradients.
//!
//! Every line is scanned in order, so results depend on the line only. Floats are added and multiplied in f64 and rounded once
//! per result, integers are added and multiplied in i64 and wrap. Maxima and minima are compared in the type of the elements.

mod extreme;
mod gradient;
mod total;

pub use extreme::{ScannedExtremes, carry_extremes, scan_extremes};
pub use gradient::{ProductScan, add_to_places, extreme_sums, product_gradient, product_parts};
pub use total::{carry_totals, scan_totals};

/// What a scan accumulates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScanKind {
    /// Cumulative sums.
    Sum,
    /// Cumulative products.
    Prod,
    /// Cumulative maxima; NaN from the first NaN on.
    Max,
    /// Cumulative minima; NaN from the first NaN on.
    Min,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IndexRange;
    use candle_core::{DType, Device, Tensor};

    /// The line at `number` of a tensor along `dim`, as f64.
    fn line(x: &Tensor, dim: usize, number: usize) -> Vec<f64> {
        let last = x.transpose(dim, x.rank() - 1).unwrap().to_dtype(DType::F64).unwrap();
        let n = x.dims()[dim];
        last.flatten_all().unwrap().to_vec1::<f64>().unwrap()[number * n..(number + 1) * n].to_vec()
    }

    fn numbers(shape: &[usize], dtype: DType) -> Tensor {
        let count = shape.iter().product::<usize>() as u32;
        let t = Tensor::arange(0u32, count, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        let t = t.affine(0.7, 1.0).unwrap().sin().unwrap().affine(3.0, 2.0).unwrap();
        let t = if dtype.is_float() { t } else { t.round().unwrap().abs().unwrap() };
        t.reshape(shape).unwrap().to_dtype(dtype).unwrap()
    }

    #[test]
    fn sums_and_products_equal_the_plain_loop_in_every_type_and_direction() {
        let shapes: [(&[usize], usize); 5] =
            [(&[37], 0), (&[21, 9], 1), (&[21, 9], 0), (&[3, 5, 700], 1), (&[2, 4, 1], 2)];
        for (shape, dim) in shapes {
            for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::U8] {
                let x = numbers(shape, dtype);
                for (kind, reverse, exclusive) in
                    [(ScanKind::Sum, false, false), (ScanKind::Sum, true, false), (ScanKind::Prod, true, true)]
                {
                    let (values, totals) = scan_totals(&x, dim, kind, reverse, exclusive).unwrap();
                    let out = if dtype.is_float() { dtype } else { DType::I64 };
                    assert_eq!((values.dtype(), totals.dtype()), (out, out));
                    for number in [0, x.elem_count() / shape[dim] - 1] {
                        let mut row = line(&x, dim, number);
                        if reverse {
                            row.reverse();
                        }
                        let mut total = if kind == ScanKind::Sum { 0.0 } else { 1.0 };
                        let mut expected: Vec<f64> = Vec::new();
                        for x in row {
                            let before = total;
                            total = if kind == ScanKind::Sum { total + x } else { total * x };
                            expected.push(if exclusive { before } else { total });
                        }
                        if reverse {
                            expected.reverse();
                        }
                        // The largest products of integers wrap.
                        if !dtype.is_float() && expected.iter().any(|x| x.abs() > 1e15) {
                            continue;
                        }
                        let rounded = Tensor::new(expected, &Device::Cpu).unwrap().to_dtype(out).unwrap();
                        let rounded = rounded.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                        assert_eq!(line(&values, dim, number), rounded, "{kind:?} of {dtype:?} {shape:?} along {dim}");
                    }
                }
            }
        }
    }

    #[test]
    fn scans_of_large_integers_are_exact() {
        let big = 1i64 << 53;
        let x = Tensor::new(&[[big, 1, i64::MAX - big - 1], [1, 3, big + 1]], &Device::Cpu).unwrap();
        let (sums, totals) = scan_totals(&x, 1, ScanKind::Sum, false, false).unwrap();
        assert_eq!(sums.to_vec2::<i64>().unwrap(), [[big, big + 1, i64::MAX], [1, 4, big + 5]]);
        assert_eq!(totals.to_vec2::<i64>().unwrap(), [[i64::MAX], [big + 5]]);
        let x = Tensor::new(&[big, big + 1, big, i64::MAX, i64::MAX - 1], &Device::Cpu).unwrap();
        let scanned = scan_extremes(&x, 0, ScanKind::Max, 10).unwrap();
        assert_eq!(scanned.values.to_vec1::<i64>().unwrap(), [big, big + 1, big + 1, i64::MAX, i64::MAX]);
        assert_eq!(scanned.indices.to_vec1::<i64>().unwrap(), [10, 11, 11, 13, 13]);
        let heads = Tensor::new(&[big + 1, i64::MAX - big - 1], &Device::Cpu).unwrap();
        let x = Tensor::new(&[0i64, 1], &Device::Cpu).unwrap();
        let carried = carry_totals(&x, &heads, 0, ScanKind::Sum, 1, false).unwrap();
        assert_eq!(carried.to_vec1::<i64>().unwrap(), [big + 1, big + 2]);
        let carried = carry_totals(&x, &heads, 0, ScanKind::Sum, 2, true).unwrap();
        assert_eq!(carried.to_vec1::<i64>().unwrap(), [i64::MAX, i64::MIN]);
    }

    #[test]
    fn maxima_take_the_last_of_equal_elements_and_keep_nan() {
        let nan = f32::NAN;
        let x =
            Tensor::new(&[[1f32, 1.0, 0.0, nan, 5.0, nan], [-0.0, 0.0, -1.0, 2.0, 2.0, 1.0]], &Device::Cpu).unwrap();
        for (x, dim) in [(x.clone(), 1), (x.t().unwrap(), 0)] {
            let max = scan_extremes(&x, dim, ScanKind::Max, 0).unwrap();
            let indices = if dim == 0 { max.indices.t().unwrap() } else { max.indices };
            assert_eq!(indices.to_vec2::<i64>().unwrap(), [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 4]]);
            let min = scan_extremes(&x, dim, ScanKind::Min, 0).unwrap();
            let indices = if dim == 0 { min.indices.t().unwrap() } else { min.indices };
            assert_eq!(indices.to_vec2::<i64>().unwrap(), [[0, 1, 2, 3, 3, 5], [0, 1, 2, 2, 2, 2]]);
            let last: Vec<f32> = min.last_values.flatten_all().unwrap().to_vec1().unwrap();
            assert!(last[0].is_nan() && last[1] == -1.0);
            assert_eq!(min.last_indices.flatten_all().unwrap().to_vec1::<i64>().unwrap(), [5, 2]);
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let x = numbers(&[300, 700], DType::F32);
                let mut all = Vec::new();
                for dim in 0..2 {
                    let (values, totals) = scan_totals(&x, dim, ScanKind::Sum, false, false).unwrap();
                    let max = scan_extremes(&x, dim, ScanKind::Max, 0).unwrap();
                    let sorted = crate::top_k(&x, dim, 300, crate::SortOrder::Descending, 0).unwrap();
                    let first = crate::top_k(&x, dim, 1, crate::SortOrder::Smallest, 0).unwrap();
                    let held = IndexRange::all(x.dims()[dim]);
                    let gathered = crate::gather(&x, dim, &first.1, &held).unwrap();
                    let index = max.indices.flatten_all().unwrap().narrow(0, 0, x.dims()[dim]).unwrap();
                    let added =
                        crate::index_add(dim, &index.contiguous().unwrap(), &x, &held, crate::SumsFrom::Zero).unwrap();
                    let scattered =
                        crate::scatter_add(x.dims(), dim, &sorted.1, &sorted.0, &held, crate::SumsFrom::Zero).unwrap();
                    all.extend([values, totals, max.indices, sorted.0, sorted.1, gathered, added, scattered]);
                }
                all.iter().map(|t| crate::bytes_of(t).unwrap()).collect::<Vec<_>>()
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(4));
    }
}
