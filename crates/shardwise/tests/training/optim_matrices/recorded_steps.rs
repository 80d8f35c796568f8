//! Steps of Muon and Adafactor recorded from `torch.optim` of PyTorch 2.15, and Muon's formula in f64.

use shardwise::optim::{Adafactor, AdjustLr, Muon, ParamGroup};

/// Three steps from [`recorded_start`] against [`recorded_gradient`].
pub(crate) struct Recorded<S> {
    shape: &'static [usize],
    lr: f64,
    maximize: bool,
    settings: S,
    /// In f64; of Muon with iterations in f64 too.
    expected: &'static [f64],
    /// For parameters of f64 and of f32.
    tolerances: [f64; 2],
}

pub(crate) type Parts = (Vec<usize>, ParamGroup, &'static [f64], [f64; 2]);

impl<S: Copy + Into<ParamGroup>> Recorded<S> {
    pub(crate) fn parts(&self) -> Parts {
        let group = ParamGroup { lr: self.lr, maximize: self.maximize, ..self.settings.into() };
        (self.shape.to_vec(), group, self.expected, self.tolerances)
    }
}

pub(crate) fn recorded_start(flat: usize) -> f64 {
    ((flat * 7 + 3) % 11) as f64 / 4.0 - 1.25
}

pub(crate) fn recorded_gradient(flat: usize, t: usize) -> f64 {
    ((flat * 5 + t * 3 + 2) % 13) as f64 / 8.0 - 0.75
}

const DEFAULT: Muon = Muon {
    weight_decay: 0.1,
    momentum: 0.95,
    nesterov: true,
    ns_coefficients: (3.4445, -4.7750, 2.0315),
    eps: 1e-7,
    ns_steps: 5,
    adjust_lr_fn: None,
};
const LIKE_ADAMW: Muon =
    Muon { nesterov: false, momentum: 0.8, adjust_lr_fn: Some(AdjustLr::MatchRmsAdamw), weight_decay: 0.2, ..DEFAULT };
const UNCLAMPED: Muon = Muon { adjust_lr_fn: Some(AdjustLr::SpectralUnclamped), ns_steps: 3, ..DEFAULT };

const fn muon(settings: Muon, shape: &'static [usize], tolerance: f64, expected: &'static [f64]) -> Recorded<Muon> {
    Recorded { shape, lr: 0.1, maximize: false, settings, expected, tolerances: [tolerance, tolerance.max(1e-5)] }
}

/// PyTorch iterates in bf16: its own numbers are that far from those with iterations in f64.
const BF16: f64 = 5e-3;

pub(crate) const MUON: &[Recorded<Muon>] = &[
    muon(
        DEFAULT,
        &[3, 4],
        BF16,
        &[
            -0.373950899,
            1.19569063,
            0.143842682,
            -0.706140816,
            0.852732718,
            0.0720819905,
            -1.06103468,
            0.715240955,
            -0.279559731,
            -1.26574564,
            0.673833191,
            -0.561172605,
        ],
    ),
    muon(
        DEFAULT,
        &[3, 4],
        1e-12,
        &[
            -0.3726679412042907,
            1.1933549912394121,
            0.14200148662225046,
            -0.7036963277611824,
            0.8513522411936046,
            0.07174863492445176,
            -1.0620176636654781,
            0.7156798019788047,
            -0.2780631019335598,
            -1.2644732630462479,
            0.6734921481213099,
            -0.5609061246059497,
        ],
    ),
    muon(
        LIKE_ADAMW,
        &[3, 4],
        BF16,
        &[
            -0.418770403,
            1.17465067,
            0.178812638,
            -0.714057326,
            0.883776665,
            0.0442202501,
            -0.962700367,
            0.680019081,
            -0.249789566,
            -1.19242573,
            0.543796182,
            -0.495023936,
        ],
    ),
    muon(
        LIKE_ADAMW,
        &[3, 4],
        1e-12,
        &[
            -0.4190241548394549,
            1.1741305956455894,
            0.17936474003035235,
            -0.7138686900211743,
            0.884216754308671,
            0.04359789878016317,
            -0.9627748117125869,
            0.6802790145784887,
            -0.2488470131576812,
            -1.1923213113725848,
            0.5434284286128501,
            -0.4948690420516861,
        ],
    ),
    muon(
        UNCLAMPED,
        &[3, 4],
        BF16,
        &[
            -0.386783987,
            1.20165145,
            0.159427837,
            -0.710140228,
            0.865954876,
            0.0659676939,
            -1.04021466,
            0.708242834,
            -0.276446611,
            -1.25580752,
            0.634998262,
            -0.54805541,
        ],
    ),
    muon(
        UNCLAMPED,
        &[3, 4],
        1e-12,
        &[
            -0.3862752398337046,
            1.2010235872092934,
            0.15859672277305545,
            -0.7092296199546153,
            0.864932991220263,
            0.06578553055980955,
            -1.0407085903283573,
            0.7088287561283185,
            -0.2756334688025846,
            -1.2550267363901122,
            0.6345017723945602,
            -0.5475477444501872,
        ],
    ),
    muon(
        DEFAULT,
        &[5, 3],
        BF16,
        &[
            -0.398799181,
            1.26101243,
            0.23119615,
            -0.736183941,
            0.876641512,
            0.139729574,
            -1.10121071,
            0.753143191,
            -0.17649667,
            -1.27742088,
            0.670746624,
            -0.584261596,
            1.24110973,
            0.349973142,
            -0.723959386,
        ],
    ),
    muon(
        DEFAULT,
        &[5, 3],
        1e-12,
        &[
            -0.3998763013676599,
            1.2596337322505353,
            0.23453808104689675,
            -0.7344756135452715,
            0.876763346222408,
            0.1394010288076205,
            -1.1013708228847676,
            0.7548012379813448,
            -0.17626484706431686,
            -1.2771055444334556,
            0.6677486866272594,
            -0.5814490599385719,
            1.2403681099806607,
            0.3506604961544005,
            -0.7236172830242895,
        ],
    ),
    muon(
        LIKE_ADAMW,
        &[5, 3],
        BF16,
        &[
            -0.445181847,
            1.16448438,
            0.202053398,
            -0.703759968,
            0.901737928,
            0.065863736,
            -0.986451149,
            0.708877861,
            -0.20634836,
            -1.20774734,
            0.542463124,
            -0.506045341,
            1.19566703,
            0.28285104,
            -0.699417233,
        ],
    ),
    muon(
        LIKE_ADAMW,
        &[5, 3],
        1e-12,
        &[
            -0.4455551863228533,
            1.1645755119787622,
            0.2017652026111154,
            -0.7034061667799849,
            0.9008157126240327,
            0.06644000113470114,
            -0.9856098805628967,
            0.7085167374540502,
            -0.2056103487971685,
            -1.2072419483612002,
            0.5427570508163596,
            -0.5069877992900165,
            1.195475081413058,
            0.2836526362970879,
            -0.7000131613279905,
        ],
    ),
    muon(
        UNCLAMPED,
        &[5, 3],
        BF16,
        &[
            -0.399857521,
            1.25822103,
            0.217009261,
            -0.749362051,
            0.871807277,
            0.139210343,
            -1.10345054,
            0.750916541,
            -0.167701319,
            -1.28309262,
            0.666525841,
            -0.589163542,
            1.25111008,
            0.347840726,
            -0.729473829,
        ],
    ),
    muon(
        UNCLAMPED,
        &[5, 3],
        1e-12,
        &[
            -0.399159149821733,
            1.2566987240921896,
            0.21894122876421754,
            -0.7479447402720358,
            0.8721609801835171,
            0.13849684267366963,
            -1.1027950158010686,
            0.7512314019664185,
            -0.16770186261684927,
            -1.2835719590811834,
            0.6652275093870599,
            -0.5878691424963981,
            1.250996015316413,
            0.3482187962786672,
            -0.7279978965489461,
        ],
    ),
];

const fn adafactor(
    shape: &'static [usize],
    (lr, maximize, settings): (f64, bool, Adafactor),
    expected: &'static [f64],
) -> Recorded<Adafactor> {
    Recorded { shape, lr, maximize, settings, expected, tolerances: [1e-13, 1e-6] }
}

const PLAIN: (f64, bool, Adafactor) =
    (0.1, false, Adafactor { beta2_decay: -0.8, eps: (None, 1e-3), d: 1.0, weight_decay: 0.0 });
const OTHER: (f64, bool, Adafactor) =
    (0.3, true, Adafactor { beta2_decay: -0.5, eps: (Some(1e-3), 1e-2), d: 2.0, weight_decay: 0.2 });

pub(crate) const ADAFACTOR: &[Recorded<Adafactor>] = &[
    adafactor(
        &[3, 4],
        PLAIN,
        &[
            -0.4331697115260645,
            1.2514950703046424,
            0.25693449403900875,
            -0.8173944968539846,
            0.902418427100266,
            0.13743556543710173,
            -1.154992925380622,
            0.7753244048371698,
            -0.2479633221947306,
            -1.3192079492286803,
            0.6595595791953544,
            -0.6378858446152349,
        ],
    ),
    adafactor(
        &[3, 4],
        OTHER,
        &[
            -0.5804502414575443,
            1.0365161220524426,
            0.12188945120137377,
            -0.3985901543588455,
            1.0822526358720521,
            -0.3684034737020855,
            -0.3227026541561341,
            0.5023782624440606,
            -0.1798118992659966,
            -0.8389745178450955,
            -0.04567272062244641,
            0.011097780819860313,
        ],
    ),
    adafactor(
        &[5],
        PLAIN,
        &[-0.44620261220816176, 1.1617238547906912, 0.24619453670310196, -0.8156540702707168, 0.8863409343263732],
    ),
    adafactor(
        &[5],
        OTHER,
        &[-0.4471683925905087, 1.1986658187728423, 0.07758516727301235, -0.21484416649798224, 1.0832157732927603],
    ),
    adafactor(
        &[2, 3, 2],
        PLAIN,
        &[
            -0.42624711607109006,
            1.2116681758161874,
            0.25210474275235367,
            -0.8252535039621585,
            0.93843502014367,
            0.1394914395942055,
            -1.1815287716852043,
            0.7506790962637169,
            -0.23442415990214288,
            -1.3302160803548648,
            0.672226665209778,
            -0.6209455177520229,
        ],
    ),
    adafactor(
        &[2, 3, 2],
        OTHER,
        &[
            -0.5986753905625617,
            1.1801652781651601,
            0.1421467337192612,
            -0.36033674391860265,
            0.954642973026708,
            -0.3774614296283028,
            -0.2634557367372346,
            0.5884677126326712,
            -0.22390387274669546,
            -0.8389862948421181,
            -0.10264177332790189,
            -0.018205474239164614,
        ],
    ),
    adafactor(&[], PLAIN, &[-0.4688922124344542]),
    adafactor(&[], OTHER, &[-0.43744882475689895]),
];

/// One step of Muon on a row-major matrix, as PyTorch's documentation has it, in f64.
pub(crate) fn muon_step(
    settings: &Muon,
    lr: f64,
    [rows, columns]: [usize; 2],
    param: &mut [f64],
    momentum: &mut [f64],
    gradient: &[f64],
) {
    let keep = settings.momentum;
    let mut update = Vec::new();
    for (b, g) in momentum.iter_mut().zip(gradient) {
        *b += (1.0 - keep) * (g - *b);
        update.push(if settings.nesterov { g + keep * (*b - g) } else { *b });
    }
    // The iteration on the shorter side.
    let is_tall = rows > columns;
    let (n, m) = if is_tall { (columns, rows) } else { (rows, columns) };
    let at = |i: usize, j: usize| if is_tall { j * columns + i } else { i * columns + j };
    let norm = update.iter().map(|x| x * x).sum::<f64>().sqrt().max(settings.eps);
    let mut x: Vec<Vec<f64>> = (0..n).map(|i| (0..m).map(|j| update[at(i, j)] / norm).collect()).collect();
    let (a, b, c) = settings.ns_coefficients;
    for _ in 0..settings.ns_steps {
        let dot = |u: &[f64], v: &[f64]| u.iter().zip(v).map(|(u, v)| u * v).sum::<f64>();
        let gram: Vec<Vec<f64>> = x.iter().map(|u| x.iter().map(|v| dot(u, v)).collect()).collect();
        let entry = |i: usize, j: usize| b * gram[i][j] + c * dot(&gram[i], &gram[j]);
        let polynomial: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| entry(i, j)).collect()).collect();
        let next = |i: usize, j: usize| a * x[i][j] + (0..n).map(|l| polynomial[i][l] * x[l][j]).sum::<f64>();
        x = (0..n).map(|i| (0..m).map(|j| next(i, j)).collect()).collect();
    }
    let scale = match settings.adjust_lr_fn {
        None | Some(AdjustLr::Original) => (rows as f64 / columns as f64).max(1.0).sqrt(),
        Some(AdjustLr::MatchRmsAdamw) => 0.2 * (rows.max(columns) as f64).sqrt(),
        Some(AdjustLr::SpectralUnclamped) => (rows as f64 / columns as f64).sqrt(),
    };
    for (i, row) in x.iter().enumerate() {
        for (j, x) in row.iter().enumerate() {
            let p = &mut param[at(i, j)];
            *p = *p * (1.0 - lr * settings.weight_decay) - lr * scale * x;
        }
    }
}
