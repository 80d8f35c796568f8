//! Sampling, against what transformers' logits processors leave of the same logits.

use serde::Deserialize;
use shardwise::generate::Sampling;

#[derive(Deserialize)]
struct Case {
    settings: Settings,
    logits: Vec<f32>,
    seen: Vec<u32>,
    probabilities: Vec<f64>,
}

#[derive(Deserialize, Debug)]
struct Settings {
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
}

#[test]
fn probabilities_are_those_of_transformers() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/sampling.jsonl")).unwrap();
    let cases: Vec<Case> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), 32);
    for Case { settings, mut logits, seen, probabilities } in cases {
        let sampling = Sampling::new(settings.temperature.unwrap_or(1.0))
            .top_k(settings.top_k.unwrap_or(0))
            .top_p(settings.top_p.unwrap_or(1.0))
            .min_p(settings.min_p.unwrap_or(0.0))
            .repetition_penalty(settings.repetition_penalty.unwrap_or(1.0));
        sampling.check().unwrap();
        // in two halves, as two ranks would
        let (left, right) = logits.split_at_mut(3);
        sampling.penalize(left, 0, seen.iter().copied());
        sampling.penalize(right, 3, seen.iter().copied());
        let mut found = vec![0.0; logits.len()];
        for (id, probability) in sampling.distribution((0..).zip(logits).collect()) {
            found[id as usize] = probability;
        }
        for (found, expected) in found.iter().zip(&probabilities) {
            // A token that is dropped has exactly 0 on both sides; theirs are computed in f32.
            let same = (*found == 0.0) == (*expected == 0.0) && (found - expected).abs() <= 1e-6 + 1e-4 * expected;
            assert!(same, "{settings:?}: {found} instead of {expected}");
        }
    }
}

#[test]
fn tokens_are_picked_as_often_as_they_are_likely() {
    let sampling = Sampling::new(1.0).top_k(3).seed(5);
    let kept = sampling.distribution(vec![(0, 0.0), (1, 3f32.ln()), (2, -9.0), (3, 2f32.ln())]);
    let mut counts = [0i32; 4];
    (0..6000).for_each(|number| counts[sampling.pick(&kept, number).unwrap() as usize] += 1);
    assert_eq!(counts[2], 0);
    for (token, expected) in [(0, 1000), (1, 3000), (3, 2000)] {
        // five standard deviations
        assert!((counts[token] - expected).abs() < 5 * 40, "{counts:?}");
    }
    let drawn = |seed| (0..40).map(|number| sampling.clone().seed(seed).pick(&kept, number)).collect::<Vec<_>>();
    assert!(drawn(1) == drawn(1) && drawn(1) != drawn(2));
}

#[test]
fn strange_logits_leave_a_token() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for sampling in [Sampling::greedy(), Sampling::new(0.5).top_p(0.1).min_p(1.0), Sampling::new(1e-300).top_k(2)] {
        for logits in [vec![-inf, 1.0, -inf], vec![-inf; 3], vec![0.0; 3], vec![inf, 1.0, 2.0], vec![nan, -1.0, nan]] {
            let kept = sampling.distribution((0..).zip(logits.clone()).collect());
            let total: f64 = kept.iter().map(|(_, probability)| probability).sum();
            assert!(!kept.is_empty() && (total - 1.0).abs() < 1e-9, "{sampling:?} {logits:?}: {kept:?}");
        }
        assert!(sampling.distribution(Vec::new()).is_empty() && sampling.pick(&[], 0).is_none());
    }
    // the lowest id of equal logits
    assert_eq!(Sampling::greedy().distribution(vec![(4, 1.0), (2, 1.0), (3, 0.0)]), [(2, 1.0)]);
    assert_eq!(Sampling::new(1.0).top_k(1).distribution(vec![(4, 1.0), (2, 1.0)]), [(2, 1.0)]);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    for (sampling, name) in [
        (Sampling::new(f64::NAN), "temperature"),
        (Sampling::new(1.0).top_p(1.5), "top-p"),
        (Sampling::new(1.0).min_p(-0.1), "min-p"),
        (Sampling::greedy().repetition_penalty(0.0), "repetition penalty"),
        (Sampling::greedy().stop(""), "stop"),
    ] {
        let error = sampling.check().unwrap_err().to_string();
        assert!(error.starts_with(&format!("invalid {name}: found ")), "{error}");
    }
}
