//! The scaling of rotary positions: GGUF files have factors per frequency where a configuration has the rule that gives them.

use serde_json::{Value as Json, json};

use super::metadata::{Metadata, bad};
use crate::error::{Error, ErrorKind, Result};

/// Factors per frequency that a file has as tensors.
#[derive(Default)]
pub(super) struct RopeFactors {
    /// `rope_freqs.weight`: the frequencies are divided by these (Llama 3).
    pub(super) frequencies: Option<Vec<f32>>,
    /// `rope_factors_long.weight` and `rope_factors_short.weight` (Phi 3).
    pub(super) long_and_short: Option<(Vec<f32>, Vec<f32>)>,
}

/// The context of Llama 3 before its positions were extended; other contexts with other bounds give the same frequencies.
const LLAMA3_CONTEXT: usize = 8192;
/// Largest relative error of a frequency that a rule for it may have: the factors of the file are rounded to f32.
const FACTOR_ERROR: f64 = 1e-4;

/// The `rope_scaling` of a configuration, null for none.
pub(super) fn rope_scaling(meta: &Metadata<'_>, factors: &RopeFactors, theta: f64, dims: usize) -> Result<Json> {
    let original = meta.count(".rope.scaling.original_context_length")?;
    let factor = meta.number(".rope.scaling.factor")?;
    let kind = meta.text(".rope.scaling.type")?;
    if let Some(frequencies) = &factors.frequencies {
        return llama3(frequencies, theta, dims, original.unwrap_or(LLAMA3_CONTEXT));
    }
    if let Some((long, short)) = &factors.long_and_short {
        let plain = |factors: &[f32]| factors.iter().map(|x| shortest(*x)).collect::<Vec<f64>>();
        // The factor of the attention follows from the lengths, as in Phi 3's configuration.
        meta.number(".rope.scaling.attn_factor")?;
        return Ok(
            json!({ "rope_type": "longrope", "type": "longrope", "long_factor": plain(long), "short_factor": plain(short) }),
        );
    }
    let linear = meta.number(".rope.scale_linear")?;
    match (kind, factor) {
        (None | Some("none"), None) => Ok(match linear {
            Some(factor) if factor != 1.0 => json!({ "rope_type": "linear", "factor": factor }),
            _ => Json::Null,
        }),
        (None | Some("linear"), Some(factor)) => Ok(json!({ "rope_type": "linear", "factor": factor })),
        (Some("yarn"), Some(factor)) => {
            let mut rule = json!({ "rope_type": "yarn", "factor": factor });
            if let Some(original) = original {
                rule["original_max_position_embeddings"] = json!(original);
            }
            let names = [
                (".rope.scaling.yarn_attn_factor", "attention_factor"),
                (".rope.scaling.yarn_beta_fast", "beta_fast"),
                (".rope.scaling.yarn_beta_slow", "beta_slow"),
            ];
            for (key, name) in names {
                if let Some(number) = meta.number(key)? {
                    rule[name] = json!(number);
                }
            }
            Ok(rule)
        }
        (kind, factor) => {
            let found = format!("rope.scaling.type {} with factor {}", kind.unwrap_or("none"), factor.unwrap_or(1.0));
            let needed = "none, linear or yarn with a factor";
            Err(ErrorKind::Unsupported.error(
                "GGUF metadata",
                found,
                needed,
                "use the Hugging Face directory of the model",
            ))
        }
    }
}

/// The `f64` whose shortest decimal is that of an `f32`.
pub(super) fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Finds the rule of Llama 3 that gives these factors. Waves longer than a bound are stretched by the largest factor, waves
/// shorter than another bound stay, and the inverse factors of those between are linear in the frequency.
fn llama3(factors: &[f32], theta: f64, dims: usize, context: usize) -> Result<Json> {
    if factors.len() != dims / 2 || !factors.iter().all(|f| f.is_finite() && *f >= 1.0) {
        return Err(bad("rope_freqs.weight", &format!("{} factors", factors.len()), "one of at least 1 per frequency"));
    }
    let factors: Vec<f64> = factors.iter().map(|f| f64::from(*f)).collect();
    let largest = factors.iter().copied().fold(1.0, f64::max);
    if largest == 1.0 {
        return Ok(Json::Null);
    }
    // Inverse wavelengths, the longest wave last.
    let waves: Vec<f64> =
        (0..factors.len()).map(|i| theta.powf(-2.0 * i as f64 / dims as f64) / std::f64::consts::TAU).collect();
    // A rule is known by the inverse wavelengths of its bounds.
    let gives = |low: f64, high: f64| {
        waves.iter().zip(&factors).all(|(&wave, &factor)| {
            let smooth = ((wave - low) / (high - low)).clamp(0.0, 1.0);
            let expected = 1.0 / ((1.0 - smooth) / largest + smooth);
            (expected - factor).abs() <= FACTOR_ERROR * factor
        })
    };
    let context = context as f64;
    let (low, high) = [(1.0 / context, 4.0 / context), fitted_bounds(&waves, &factors, largest)]
        .into_iter()
        .find(|&(low, high)| gives(low, high))
        .ok_or_else(|| {
            ErrorKind::Unsupported.error::<Error>(
                "GGUF file",
                "factors in rope_freqs.weight that no llama3 scaling gives",
                "factors between 1 and one largest factor, by wavelength",
                "use the Hugging Face directory of the model",
            )
        })?;
    // Rounding keeps the usual factors 1 and 4 as they are.
    let rounded = |bound: f64| (bound * context * 1e9).round() / 1e9;
    Ok(json!({
        "rope_type": "llama3",
        "factor": shortest(largest as f32),
        "low_freq_factor": rounded(low),
        "high_freq_factor": rounded(high),
        "original_max_position_embeddings": context as usize,
    }))
}

/// Bounds that fit the factors: by the line through the frequencies between them, or between the last frequency that is
/// divided by all of the factor and the first that stays.
fn fitted_bounds(waves: &[f64], factors: &[f64], largest: f64) -> (f64, f64) {
    let smooth = |factor: f64| (1.0 / factor - 1.0 / largest) / (1.0 - 1.0 / largest);
    let between: Vec<(f64, f64)> = waves
        .iter()
        .zip(factors)
        .map(|(&wave, &factor)| (wave, smooth(factor)))
        .filter(|(_, s)| (FACTOR_ERROR..1.0 - FACTOR_ERROR).contains(s))
        .collect();
    match between.as_slice() {
        [] => {
            let stretched = waves.iter().zip(factors).find(|(_, factor)| **factor > 1.0).map_or(0.0, |(wave, _)| *wave);
            let kept = waves.iter().zip(factors).rfind(|(_, factor)| **factor == 1.0).map(|(wave, _)| *wave);
            let ratio = kept.unwrap_or(8.0 * stretched) / stretched;
            (stretched * ratio.powf(1.0 / 3.0), stretched * ratio.powf(2.0 / 3.0))
        }
        // One point does not determine a line: with the usual ratio of the bounds, 4, it does.
        [(wave, s)] => (wave / (1.0 + 3.0 * s), 4.0 * wave / (1.0 + 3.0 * s)),
        [(first, s0), .., (last, s1)] => {
            let slope = (s0 - s1) / (first - last);
            (first - s0 / slope, first + (1.0 - s0) / slope)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(theta: f64, dims: usize, factor: f64, low: f64, high: f64, context: f64) -> Vec<f32> {
        let one = |i: usize| {
            let wave = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / dims as f64);
            let smooth = ((context / wave - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
        };
        (0..dims / 2).map(one).collect()
    }

    #[test]
    fn the_rule_behind_llama3_factors_is_found() {
        let usual = llama3(&factors(500_000.0, 128, 8.0, 1.0, 4.0, 8192.0), 500_000.0, 128, 8192).unwrap();
        let expected = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        assert_eq!(usual, expected);
        // Other bounds, with many, one and no frequency between them: the same factors come back.
        for (theta, dims, factor, low, high, context) in [
            (10_000.0, 128, 32.0, 1.0, 2.0, 1024.0),
            (500_000.0, 64, 4.0, 2.0, 16.0, 8192.0),
            (500_000.0, 16, 8.0, 1.0, 4.0, 32.0),
            (100_000.0, 8, 16.0, 1.0, 8.0, 300.0),
        ] {
            let before = factors(theta, dims, factor, low, high, context);
            let rule = llama3(&before, theta, dims, 8192).unwrap();
            let number = |name: &str| rule[name].as_f64().unwrap();
            let after =
                factors(theta, dims, number("factor"), number("low_freq_factor"), number("high_freq_factor"), 8192.0);
            for (a, b) in before.iter().zip(&after) {
                assert!((a - b).abs() <= 2e-4 * a, "{before:?} {after:?} {rule}");
            }
        }
        assert_eq!(llama3(&[1.0; 4], 1e4, 8, 8192).unwrap(), Json::Null);
        assert!(llama3(&[1.0, 3.0, 1.0, 2.0], 1e4, 8, 8192).is_err());
        assert!(llama3(&[1.0, f32::NAN, 1.0, 2.0], 1e4, 8, 8192).is_err());
        assert!(llama3(&[1.0; 3], 1e4, 8, 8192).is_err());
    }
}
