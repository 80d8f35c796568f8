//! Operators whose results are not bounded by their inputs check sizes before they compute; all other operators are listed with the
//! reason why theirs are.

use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::path::Path;

use shardwise::ops::{
    ConvOptions, ConvTransposeOptions, CtcOptions, EmbeddingOptions, FftNorm, GridMode, GridPadding,
    InterpolateOptions, PadMode, Reduction, composed_ops, ops,
};
use shardwise::prelude::*;
use shardwise_test_suites::refusals::{AT_ONCE, VAST, refused};

use crate::ops_table::{files, methods};

/// An operation that needs memory for every element.
trait ContiguousSum {
    fn contiguous_sum(&self) -> Result<DTensor>;
}

impl ContiguousSum for DTensor {
    fn contiguous_sum(&self) -> Result<DTensor> {
        self.add(self)
    }
}

/// A vector that is small by itself, and whose pairs of elements are too many.
fn long(x: &DTensor) -> Result<DTensor> {
    DTensor::zeros(1 << 22, DType::I64, x.device_mesh(), [Shard(0)])
}

/// The same as a matrix of one column.
fn column(x: &DTensor) -> Result<DTensor> {
    long(x)?.to_dtype(DType::F32)?.unsqueeze(1)
}

/// Four elements as an image.
fn image(x: &DTensor) -> Result<DTensor> {
    x.to_dtype(DType::F32)?.reshape(&[1, 1, 2, 2])
}

/// Four elements as a signal.
fn line(x: &DTensor) -> Result<DTensor> {
    x.to_dtype(DType::F32)?.reshape(&[1, 1, 4])
}

/// Weights of a convolution whose windows have one element.
fn filter(x: &DTensor, spatial: usize) -> Result<DTensor> {
    DTensor::ones(vec![1; 2 + spatial], DType::F32, x.device_mesh(), [Replicate])
}

fn step(stride: usize) -> ConvTransposeOptions {
    ConvTransposeOptions { stride, ..ConvTransposeOptions::default() }
}

type Enlarging = (&'static str, fn(&DTensor, usize) -> Result<DTensor>);

/// Every operator whose result is not bounded by its inputs, or whose table of the result is not: its name, and what is different
/// where it has two cases.
const ENLARGING: &[Enlarging] = &[
    ("repeat", |x, n| x.repeat(&[n])),
    ("tile", |x, n| x.tile(&[n, n])),
    ("repeat_interleave", |x, n| x.repeat_interleave(n, 0)),
    ("repeat_interleave_each", |x, n| x.repeat_interleave_each(&x.clamp_min((n >> 1) as i64)?, 0)),
    ("combinations", |x, n| x.combinations(n, true)),
    ("combinations without replacement", |x, _| x.repeat(&[50])?.combinations(100, false)),
    ("cartesian_prod", |x, _| {
        let vector = long(x)?;
        DTensor::cartesian_prod(&[&vector, &vector, &vector, &vector])
    }),
    ("meshgrid", |x, _| {
        let vector = long(x)?;
        DTensor::meshgrid(&[&vector, &vector, &vector], false)?.swap_remove(0).contiguous_sum()
    }),
    ("kron", |x, _| {
        let vector = long(x)?;
        vector.kron(&vector)
    }),
    ("outer", |x, _| {
        let vector = long(x)?;
        vector.outer(&vector)
    }),
    ("cdist", |x, _| {
        let column = long(x)?.to_dtype(DType::F32)?.unsqueeze(1)?;
        column.cdist(&column, 2.0)
    }),
    // Padding of which there are as many windows, also of no images.
    ("im2col", |x, n| {
        let images = x.to_dtype(DType::F32)?.reshape(&[1, 1, 2, 2])?.narrow(0, 0, 0)?;
        images.im2col(&[1], &[1], &[n >> 1], &[1])
    }),
    ("fft_hfftn", |x, n| {
        let sizes: &[isize] = &[(n >> 1) as isize, 3];
        x.to_dtype(DType::F32)?.reshape(&[2, 2])?.fft_hfftn(Some(sizes), None, FftNorm::Backward)
    }),
    ("unfold", |x, _| long(x)?.unfold(0, 1 << 21, 1)),
    ("diag_embed", |x, n| x.diag_embed((n >> 1) as isize, [0, 1])),
    ("diagflat", |x, n| x.diagflat((n >> 1) as isize)),
    ("block_diag", |x, _| {
        let column = long(x)?.unsqueeze(1)?;
        DTensor::block_diag(&[&column, &column.t()?])
    }),
    ("pad", |x, n| x.pad(&[(n, n)], 0)),
    ("pad_with", |x, n| {
        x.to_dtype(DType::F32)?.reshape(&[1, 1, 4])?.pad_with(&[((n >> 1) as isize, 0)], PadMode::Replicate)
    }),
    ("interpolate", |x, n| {
        x.to_dtype(DType::F32)?.reshape(&[1, 1, 4])?.interpolate(&[n], &InterpolateOptions::default())
    }),
    ("one_hot", |x, n| x.one_hot(n)),
    ("bincount", |x, n| x.bincount(None, n)),
    ("histc", |x, n| x.to_dtype(DType::F32)?.histc(n, 0.0, 1.0)),
    ("nonzero_static", |x, n| x.nonzero_static(n, 0)),
    ("multinomial", |x, n| x.to_dtype(DType::F32)?.add_scalar(1.0)?.multinomial(n, true)),
    ("tensor_split", |x, n| Ok(x.tensor_split(n, 0)?.swap_remove(0))),
    ("chunk", |x, n| Ok(x.narrow(0, 0, 0)?.chunk(n, 0)?.swap_remove(0))),
    ("expand", |x, n| x.unsqueeze(0)?.expand(&[(n >> 1) as isize, 4])?.contiguous_sum()),
    ("index", |x, _| {
        let rows = long(x)?;
        rows.unsqueeze(0)?.expand(&[4, 1 << 22])?.index(&rows)
    }),
    ("searchsorted", |x, _| {
        let sorted = long(x)?.unsqueeze(0)?;
        sorted.searchsorted(&sorted, false)
    }),
    ("adaptive_avg_pool", |x, n| image(x)?.adaptive_avg_pool(&[Some(n), None])),
    ("adaptive_max_pool", |x, n| Ok(image(x)?.adaptive_max_pool(&[None, Some(n)])?.0)),
    ("fractional_max_pool", |x, n| {
        let samples = DTensor::zeros((1, 1, 2), DType::F32, x.device_mesh(), [Replicate])?;
        Ok(image(x)?.fractional_max_pool(&[1, 1], &[n, n], &samples)?.0)
    }),
    ("max_unpool", |x, n| image(x)?.max_unpool(&x.reshape(&[1, 1, 2, 2])?, &[n, n])),
    ("col2im", |x, n| line(x)?.reshape(&[1, 4, 1])?.col2im(&[n, 1], &[1, 1], &[1, 1], &[0, 0], &[n, 1])),
    ("conv1d", |x, n| line(x)?.conv1d(&filter(x, 1)?, None, ConvOptions { padding: n >> 2, ..ConvOptions::default() })),
    ("conv2d", |x, n| {
        image(x)?.conv2d(&filter(x, 2)?, None, ConvOptions { padding: n >> 2, ..ConvOptions::default() })
    }),
    ("conv3d", |x, n| {
        let options = ConvOptions { padding: n >> 2, ..ConvOptions::default() };
        image(x)?.unsqueeze(2)?.conv3d(&filter(x, 3)?, None, options)
    }),
    ("conv_transpose1d", |x, n| line(x)?.conv_transpose1d(&filter(x, 1)?, None, step(n))),
    ("conv_transpose2d", |x, n| image(x)?.conv_transpose2d(&filter(x, 2)?, None, step(n))),
    ("conv_transpose3d", |x, n| image(x)?.unsqueeze(2)?.conv_transpose3d(&filter(x, 3)?, None, step(n))),
    ("conv_transpose1d of wide windows", |x, n| {
        let weight = DTensor::ones((1, 1, 2), DType::F32, x.device_mesh(), [Replicate])?;
        line(x)?.conv_transpose1d(
            &weight,
            None,
            ConvTransposeOptions { dilation: n, ..ConvTransposeOptions::default() },
        )
    }),
    ("fft_rfft", |x, n| Ok(line(x)?.fft_rfft(Some(n), -1, FftNorm::Backward)?.view_as_real().clone())),
    ("fft_hfft", |x, n| line(x)?.fft_hfft(Some(n), -1, FftNorm::Backward)),
    ("fft_irfft", |x, n| line(x)?.fft_irfft(Some(n), -1, FftNorm::Backward)),
    ("fft_irfftn", |x, n| image(x)?.fft_irfftn(Some(&[(n >> 1) as isize, 3]), None, FftNorm::Backward)),
    ("interpolate_by", |x, n| line(x)?.interpolate_by(&[n as f64], &InterpolateOptions::default())),
    ("interpolate_by infinitely", |x, _| line(x)?.interpolate_by(&[f64::INFINITY], &InterpolateOptions::default())),
    ("linalg_vander", |x, n| x.to_dtype(DType::F32)?.linalg_vander(Some(n))),
    ("histogram_edges", |x, n| x.to_dtype(DType::F32)?.histogram_edges(n, 0.0, 1.0)),
    ("histogramdd", |x, _| {
        let edges = long(x)?.to_dtype(DType::F32)?;
        x.to_dtype(DType::F32)?.reshape(&[2, 2])?.histogramdd(&[&edges, &edges], None, false)
    }),
    ("pdist", |x, _| column(x)?.pdist(2.0)),
    ("cov", |x, _| column(x)?.cov(1.0, None, None)),
    ("corrcoef", |x, _| column(x)?.corrcoef()),
    ("linalg_svd", |x, _| Ok(column(x)?.linalg_svd(true)?.0)),
    ("linalg_qr", |x, _| Ok(column(x)?.linalg_qr(true)?.0)),
    ("linalg_lu", |x, _| Ok(column(x)?.linalg_lu(true)?.0)),
    ("lu_unpack", |x, _| {
        let pivots = DTensor::ones(1, DType::I64, x.device_mesh(), [Replicate])?.to_dtype(DType::I32)?;
        Ok(column(x)?.lu_unpack(&pivots)?.0)
    }),
    ("linalg_polar", |x, _| Ok(column(x)?.t()?.linalg_polar()?.1)),
    ("embedding", |x, _| column(x)?.t()?.embedding(&long(x)?)),
    ("embedding_with", |x, _| column(x)?.t()?.embedding_with(&long(x)?, EmbeddingOptions::default())),
    ("index_select", |x, _| column(x)?.t()?.index_select(0, &long(x)?)),
    ("take_along_dim", |x, _| column(x)?.t()?.take_along_dim(&long(x)?.unsqueeze(1)?, Some(0))),
    ("grid_sample", |x, _| {
        let grid = DTensor::zeros((1, 1 << 22, 1, 2), DType::F32, x.device_mesh(), [Replicate])?;
        column(x)?.reshape(&[1, -1, 1, 1])?.grid_sample(&grid, GridMode::Nearest, GridPadding::Zeros, false)
    }),
    ("broadcast_tensors", |x, _| {
        let rows = column(x)?;
        DTensor::broadcast_tensors(&[&rows, &rows.t()?])?.swap_remove(0).contiguous_sum()
    }),
    ("add", |x, _| column(x)?.add(&column(x)?.t()?)),
    ("where_cond", |x, _| long(x)?.unsqueeze(1)?.where_cond(&column(x)?.t()?, 0.0)),
    ("matmul", |x, _| column(x)?.matmul(&column(x)?.t()?)),
    ("einsum", |x, _| DTensor::einsum("ni,mi->nm", &[&column(x)?, &column(x)?])),
    ("linear", |x, _| column(x)?.linear(&column(x)?, None)),
    ("addr", |x, _| line(x)?.addr(&long(x)?.to_dtype(DType::F32)?, &long(x)?.to_dtype(DType::F32)?, 1.0, 1.0)),
    ("bilinear", |x, _| {
        let weight = column(x)?.unsqueeze(2)?;
        column(x)?.bilinear(&column(x)?, &weight, None)
    }),
    ("chunk_cat", |x, n| DTensor::chunk_cat(&[x], 0, n)),
    ("pad_same", |x, n| line(x)?.pad_same(&[n], 1)),
    ("local_response_norm", |x, n| image(x)?.local_response_norm(n, 1.0, 1.0, 1.0)),
    ("multilabel_margin_loss", |x, _| column(x)?.t()?.multilabel_margin_loss(&long(x)?.unsqueeze(0)?, Reduction::None)),
    // A row with a long target among many, and lengths whose sum is that of the targets once it wraps around.
    ("ctc_loss", |x, _| {
        let (n, targets) = (1 << 20, long(x)?.narrow(0, 0, (2 << 20) - 1)?);
        let lengths = [vec![1 << 20], vec![1; n - 1]].concat();
        let scores = DTensor::zeros((1, n, 2), DType::F32, x.device_mesh(), [Shard(1)])?;
        scores.ctc_loss(&targets, &vec![1; n], &lengths, CtcOptions::default())
    }),
    ("ctc_loss of lengths that wrap around", |x, n| {
        let scores = DTensor::zeros((1, 2, 2), DType::F32, x.device_mesh(), [Replicate])?;
        scores.ctc_loss(x, &[1, 1], &[n, 4usize.wrapping_sub(n)], CtcOptions::default())
    }),
    ("pixel_shuffle", |x, n| image(x)?.pixel_shuffle(n)),
    ("pixel_unshuffle", |x, n| image(x)?.pixel_unshuffle(n)),
];

/// Why the results of operators are bounded, and the operators. Those in the tables of elementwise functions are not listed: their
/// sizes are checked in one place, as those of `add`.
const BOUNDED: &[(&str, &str)] = &[
    (
        "as many elements as the operands broadcast to, as `add` and `where_cond` above",
        "add_scalar addcdiv addcmul bce_with_logits bce_with_logits_weighted binary_cross_entropy clamp clamp_tensor \
         cosine_embedding_loss cosine_similarity cross dist div_scalar float_power gaussian_nll_loss hinge_embedding_loss \
         huber_loss isclose kl_div kl_div_log_target l1_loss ldexp lerp linalg_cross linalg_vecdot margin_ranking_loss \
         masked_fill masked_logaddexp mse_loss mul_scalar multi_margin_loss multilabel_soft_margin_loss pairwise_distance \
         poisson_nll_loss pow_scalar prelu rsub_scalar smooth_l1_loss soft_margin_loss sub_scalar triplet_margin_loss",
    ),
    (
        "as many elements as the input",
        "add_layer_norm add_rms_norm alpha_dropout argsort batch_norm bernoulli celu channel_shuffle cummax cummin cumprod \
         cumsum diagonal_scatter dropout elu expert_mlp feature_alpha_dropout feature_dropout fft_fftshift fft_ifftshift flip frexp \
         group_norm hardshrink hardsigmoid hardtanh index_add index_copy index_fill index_put index_reduce instance_norm \
         layer_norm leaky_relu log_softmax logcumsumexp logit masked_cumprod masked_cumsum masked_log_softmax masked_normalize \
         masked_scatter masked_softmax masked_softmin mvlgamma nan_to_num native_batch_norm native_group_norm native_layer_norm \
         normalize polygamma put relu6 renorm rms_norm roll rot90 rotary_embedding round_decimals rrelu safe_softmax scatter \
         scatter_add scatter_reduce select_scatter selu slice_scatter softmax softmin softplus softshrink sort tanhshrink \
         threshold tril triu",
    ),
    (
        "at most as many elements as the input: reductions, parts and views",
        "all amax amin aminmax any argmax argmin atleast_1d atleast_2d atleast_3d batch_statistics count_nonzero \
         cumulative_trapezoid diag diagonal diagonal_of diff flatten glu kthvalue linalg_matrix_norm linalg_norm \
         linalg_vector_norm logsumexp masked_amax masked_amin masked_argmax masked_argmin masked_logsumexp masked_mean \
         masked_median masked_norm masked_prod masked_select masked_std masked_sum masked_var max_dim mean median min_dim mode \
         movedim movedims nanmean nanmedian nansum narrow norm permute prod reshape select slice split split_sizes squeeze \
         squeeze_dims std std_mean sum sum_to_size t tensor_split_at topk trace transpose trapezoid unbind unflatten unique \
         unique_consecutive unsqueeze var var_mean view",
    ),
    ("a constant number of times the elements of the input", "gradient nonzero unravel_index"),
    ("as many elements as the inputs together", "cat column_stack dstack hstack stack vstack"),
    (
        "as many elements as the index or the values",
        "bucketize embedding_bag embedding_bag_with gather histogram isin take",
    ),
    ("quantiles: one of every slice for each of `q`", "nanquantile quantile"),
    (
        "at most half of a window is padding, so there are at most two windows per element and step",
        "avg_pool avg_pool1d avg_pool2d lp_pool max_pool max_pool1d max_pool2d",
    ),
    (
        "composed of a product as `matmul` and `einsum` above",
        "addbmm addmm addmv baddbmm bmm dot grouped_mm inner linalg_multi_dot linear_activation mm mv tensordot",
    ),
    (
        "square matrices, or matrices of the shape of an input",
        "cholesky_inverse cholesky_solve linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eigh linalg_eigvalsh \
         linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_solve linalg_lstsq linalg_lu_factor \
         linalg_lu_factor_ex linalg_lu_solve linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth linalg_pinv \
         linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svdvals linalg_tensorinv linalg_tensorsolve \
         logdet matrix_exp ormqr",
    ),
    (
        "a loss, or a mean of values, computed in blocks",
        "cross_entropy cross_entropy_probabilities cross_entropy_weighted cross_entropy_with linear_cross_entropy nll_loss \
         nll_loss_weighted",
    ),
    ("attention, computed in blocks of keys", "multi_head_attention_forward scaled_dot_product_attention"),
];

#[test]
fn operators_that_enlarge_check_sizes_first() {
    let mut failed = Vec::new();
    let wanted = std::env::var("SHARDWISE_OP_NAMES").unwrap_or_default();
    for &(name, call) in ENLARGING.iter().filter(|(name, _)| wanted.is_empty() || *name == wanted) {
        println!("{name}");
        for size in [usize::MAX, usize::MAX - 3, 1 << 62, VAST] {
            let run = || refused(move |mesh| call(&DTensor::arange(0.0..4.0, DType::I64, mesh, [Shard(0)])?, size));
            if catch_unwind(run).is_err() {
                failed.push(format!("{name} of {size}"));
            }
        }
    }
    assert!(failed.is_empty(), "not refused: {failed:?}");
    // Small ones, in the order of nested loops; too few elements give none, however many are asked for.
    let run = |world: World| {
        let x = DTensor::arange(0.0..4.0, DType::I64, &world.mesh([("a", 2)])?, [Shard(0)])?;
        let of = |length, replacement| -> Result<Vec<Vec<i64>>> {
            Ok(x.combinations(length, replacement)?.full_tensor()?.to_vec2()?)
        };
        let shape = |length| Ok::<_, Error>(x.combinations(length, false)?.shape().to_vec());
        assert_eq!(of(3, false)?, [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]);
        assert_eq!(of(2, true)?.len(), 10);
        assert_eq!(of(2, true)?[3..6], [[0, 3], [1, 1], [1, 2]]);
        assert_eq!((shape(5)?, shape(4)?), (vec![0, 5], vec![1, 4]));
        Ok(())
    };
    ThreadWorld::new(2).unwrap().deadline(AT_ONCE).run(run).unwrap();
}

#[test]
fn every_operator_checks_sizes_or_is_bounded_by_its_inputs() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let defined = files(&sources).into_iter().flat_map(|file| methods(&std::fs::read_to_string(file).unwrap()));
    let elementwise: BTreeSet<String> = defined.filter(|(is_table, _)| *is_table).map(|(_, name)| name).collect();
    assert!(elementwise.contains("exp") && !elementwise.contains("repeat"), "{elementwise:?}");
    let checked = ENLARGING.iter().map(|(name, _)| name.split(' ').next().unwrap_or_default());
    let checked: BTreeSet<&str> = checked.collect();
    let bounded: Vec<&str> = BOUNDED.iter().flat_map(|(_, names)| names.split_whitespace()).collect();
    let table: BTreeSet<&str> = ops().chain(composed_ops()).map(|op| op.name).collect();
    let is_stated = |name: &str| checked.contains(name) || bounded.contains(&name) || elementwise.contains(name);
    let missing: Vec<&&str> = table.iter().filter(|name| !is_stated(name)).collect();
    assert!(missing.is_empty(), "add a call that must be refused, or state why results are bounded: {missing:?}");
    let twice: Vec<&&str> = bounded.iter().filter(|name| checked.contains(**name)).collect();
    assert!(twice.is_empty(), "checked, and said to be bounded: {twice:?}");
    let unknown: Vec<&&str> = bounded.iter().filter(|name| !table.contains(**name)).collect();
    assert!(unknown.is_empty(), "no operators: {unknown:?}");
}
