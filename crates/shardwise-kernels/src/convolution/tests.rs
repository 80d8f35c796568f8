use super::geometry::TapAxis;
use super::pack::Packing;
use super::*;
use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A random geometry with small sizes, and the shapes of input, weight and result.
struct Case {
    geometry: ConvGeometry,
    shapes: [Vec<usize>; 3],
}

fn draw(rng: &mut StdRng) -> Case {
    let spatial = rng.random_range(1..4);
    let (groups, images) = (rng.random_range(1..4), rng.random_range(1..3));
    let [inner, outer] = [rng.random_range(1..4) * groups, rng.random_range(1..11) * groups];
    let axis = |rng: &mut StdRng| {
        let (kernel, stride, dilation) = (rng.random_range(1..4), rng.random_range(1..4), rng.random_range(1..4));
        let (padding, output) = (rng.random_range(0..3usize), rng.random_range(1..if spatial == 1 { 90 } else { 9 }));
        // Windows that begin at `base`; a few elements after the last window are read by none.
        let reach = (output - 1) * stride + (kernel - 1) * dilation + 1;
        let input = (reach + rng.random_range(0..3usize)).saturating_sub(2 * padding).max(1);
        WindowAxis { kernel, stride, dilation, base: -(padding as isize), input, output }
    };
    let axes: Vec<WindowAxis> = (0..spatial).map(|_| axis(rng)).collect();
    let shape = |first: usize, second: usize, of: fn(&WindowAxis) -> usize| {
        [first, second].into_iter().chain(axes.iter().map(of)).collect::<Vec<_>>()
    };
    Case {
        geometry: ConvGeometry::new(&axes, groups),
        shapes: [
            shape(images, inner, |a| a.input),
            shape(outer, inner / groups, |a| a.kernel),
            shape(images, outer, |a| a.output),
        ],
    }
}

/// Small integers, whose products and sums every type represents.
fn integers(rng: &mut StdRng, shape: &[usize]) -> Vec<i64> {
    (0..shape.iter().product::<usize>()).map(|_| rng.random_range(-3..4)).collect()
}

fn tensor(values: &[i64], shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Calls `body` with the indices in input, weight and result of every product, one after the other.
fn products(case: &Case, body: &mut dyn FnMut([usize; 3])) {
    let Case { geometry, shapes: [x, w, y] } = case;
    let sizes = geometry.axes.map(|a| a.input);
    let (kernel, counts) = (geometry.axes.map(|a| a.kernel), geometry.axes.map(|a| a.output));
    let flat = |at: [usize; 3], sizes: [usize; 3]| (at[0] * sizes[1] + at[1]) * sizes[2] + at[2];
    let unflat = |i: usize, sizes: [usize; 3]| [i / sizes[2] / sizes[1], i / sizes[2] % sizes[1], i % sizes[2]];
    let volume = |sizes: [usize; 3]| sizes.iter().product::<usize>();
    for n in 0..x[0] {
        for o in 0..w[0] {
            for c in 0..w[1] {
                let channel = o / (w[0] / geometry.groups) * w[1] + c;
                for p in 0..volume(counts) {
                    for k in 0..volume(kernel) {
                        let (p3, k3) = (unflat(p, counts), unflat(k, kernel));
                        let at: [isize; 3] = std::array::from_fn(|d| {
                            let axis = &geometry.axes[d];
                            (p3[d] * axis.stride + k3[d] * axis.dilation) as isize + axis.base
                        });
                        if (0..3).all(|d| at[d] >= 0 && (at[d] as usize) < sizes[d]) {
                            let at = flat(at.map(|i| i as usize), sizes);
                            let input = (n * x[1] + channel) * volume(sizes) + at;
                            body([input, (o * w[1] + c) * volume(kernel) + k, (n * y[1] + o) * volume(counts) + p]);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn convolutions_equal_their_sums_of_products_in_every_type() {
    for seed in 0..150 {
        let rng = &mut StdRng::seed_from_u64(seed);
        let case = draw(rng);
        let [x, w, g] = case.shapes.each_ref().map(|shape| integers(rng, shape));
        let mut expected = [vec![0; x.len()], vec![0; w.len()], vec![0; g.len()]];
        products(&case, &mut |[i, k, p]| {
            expected[0][i] += w[k] * g[p];
            expected[1][k] += x[i] * g[p];
            expected[2][p] += x[i] * w[k];
        });
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::I16] {
            let [xs, ws, gs] = &case.shapes;
            let (x, w, g) = (tensor(&x, xs, dtype), tensor(&w, ws, dtype), tensor(&g, gs, dtype));
            let found = [
                convolve_input(&g, &w, &case.geometry, xs).unwrap(),
                convolve_weight(&g, &x, &case.geometry, ws).unwrap(),
                convolve(&x, &w, &case.geometry, gs).unwrap(),
            ];
            for ((found, expected), of) in found.iter().zip(&expected).zip(["input", "weight", "result"]) {
                // Sums are exact in f32, and rounded once to half precision.
                let expected = tensor(expected, found.dims(), DType::F32).to_dtype(dtype).unwrap();
                let [found, expected] =
                    [found, &expected].map(|t| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap());
                assert_eq!(
                    found.to_vec1::<f64>().unwrap(),
                    expected.to_vec1::<f64>().unwrap(),
                    "{of} of seed {seed} in {dtype:?}: {:?} of {:?}",
                    case.geometry,
                    case.shapes
                );
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let randn = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &Device::Cpu).unwrap();
    let (x, w, g) = (randn(&[2, 16, 40, 40]), randn(&[24, 16, 3, 3]), randn(&[2, 24, 20, 20]));
    let axis = WindowAxis { kernel: 3, stride: 2, dilation: 1, base: -1, input: 40, output: 20 };
    let geometry = ConvGeometry::new(&[axis, axis], 1);
    let bits = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let found = pool.install(|| {
            [
                convolve(&x, &w, &geometry, g.dims()).unwrap(),
                convolve_input(&g, &w, &geometry, x.dims()).unwrap(),
                convolve_weight(&g, &x, &geometry, w.dims()).unwrap(),
            ]
        });
        found.map(|t| {
            t.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        })
    };
    let one = bits(1);
    for threads in [2, 3, 5] {
        assert!(bits(threads) == one, "{threads} threads");
    }
}

#[test]
fn integers_beyond_f64_are_exact() {
    let big = (1i64 << 60) + 1;
    let x = Tensor::from_vec(vec![big, 3, 5], (1, 1, 3), &Device::Cpu).unwrap();
    let w = Tensor::from_vec(vec![1i64, 1], (1, 1, 2), &Device::Cpu).unwrap();
    let axis = WindowAxis { kernel: 2, stride: 1, dilation: 1, base: 0, input: 3, output: 2 };
    let y = convolve(&x, &w, &ConvGeometry::new(&[axis], 1), &[1, 1, 2]).unwrap();
    assert_eq!(y.flatten_all().unwrap().to_vec1::<i64>().unwrap(), [big + 3, 8]);
}

#[test]
fn packed_blocks_stay_small_however_many_windows_there_are() {
    for (height, width, kernel, dilation) in
        [(4096, 4096, 3, 1), (512, 512, 11, 1), (1024, 1024, 3, 64), (1, 1 << 24, 5, 1)]
    {
        let axis = |size: usize| {
            let kernel = kernel.min(size);
            WindowAxis { kernel, stride: 1, dilation, base: 0, input: size, output: size - (kernel - 1) * dilation }
        };
        let geometry = ConvGeometry::new(&[axis(height), axis(width)], 1);
        let packing = Packing::new(geometry.axes.each_ref().map(TapAxis::forward), 64, 4);
        let (scratch, windows) = (packing.scratch(64), geometry.outputs() * geometry.window() * 64);
        // The smallest block of a window of 11 x 11 takes 64 channels times 121 rows of 96 pixels.
        assert!(
            scratch <= 1 << 20 && scratch < windows / 100,
            "{scratch} numbers for {windows} of windows: {geometry:?}"
        );
    }
}
