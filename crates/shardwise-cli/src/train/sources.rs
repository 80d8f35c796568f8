//! The sources of `--data`: paths with weights.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shardwise::Result;
use shardwise::error::ErrorKind;

/// A file or a directory of files, optionally with a weight, as in `web.bin=0.7`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DataSource {
    pub(crate) path: PathBuf,
    pub(crate) weight: Option<f64>,
}

impl FromStr for DataSource {
    type Err = Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Infallible> {
        let whole = || DataSource { path: text.into(), weight: None };
        // A name may have an equals sign, too.
        if Path::new(text).exists() {
            return Ok(whole());
        }
        let weighted = text.rsplit_once('=').and_then(|(path, weight)| Some((path, weight.parse().ok()?)));
        Ok(weighted.map_or_else(whole, |(path, weight)| DataSource { path: path.into(), weight: Some(weight) }))
    }
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.weight.map_or(Ok(()), |weight| write!(f, "={weight}"))
    }
}

impl Serialize for DataSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DataSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(text.parse().unwrap_or_else(|never: Infallible| match never {}))
    }
}

/// Reads one source or a list of them: TOML files and checkpoints of earlier versions have one.
pub(super) fn one_or_several<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Vec<DataSource>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        One(DataSource),
        Several(Vec<DataSource>),
    }
    Ok(Some(match Given::deserialize(deserializer)? {
        Given::One(source) => vec![source],
        Given::Several(sources) => sources,
    }))
}

/// The weights of sources: none, or one for each.
pub(super) fn weights(sources: &[DataSource]) -> Result<Option<Vec<f64>>> {
    let weights: Vec<f64> = sources.iter().filter_map(|source| source.weight).collect();
    if weights.is_empty() {
        return Ok(None);
    }
    let wrong = weights.iter().find(|weight| !(**weight > 0.0 && weight.is_finite()));
    if weights.len() == sources.len() && wrong.is_none() {
        return Ok(Some(weights));
    }
    let found = sources.iter().map(DataSource::to_string).collect::<Vec<_>>().join(", ");
    let needed = "a weight above 0 for each source, or for none";
    Err(ErrorKind::Argument.error("--data", found, needed, "write them as --data web.bin=0.7 --data books/=0.3"))
}

#[test]
fn sources_have_weights_after_an_equals_sign() {
    let source = |text: &str| text.parse::<DataSource>().unwrap();
    assert_eq!(source("a/b.bin=0.25"), DataSource { path: "a/b.bin".into(), weight: Some(0.25) });
    assert_eq!(source("a=b.bin"), DataSource { path: "a=b.bin".into(), weight: None });
    assert_eq!(source("a=b.bin=2").to_string(), "a=b.bin=2");
    assert_eq!(weights(&[source("a=1"), source("b=3")]).unwrap(), Some(vec![1.0, 3.0]));
    assert_eq!(weights(&[source("a"), source("b")]).unwrap(), None);
    for bad in ["a=1 b", "a=1 b=0", "a=1 b=-1", "a=1 b=nan", "a=1 b=inf"] {
        let sources: Vec<DataSource> = bad.split(' ').map(source).collect();
        assert!(weights(&sources).unwrap_err().to_string().contains("weight"), "{bad}");
    }
}
