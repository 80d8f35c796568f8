//! The option `--lora`: settings of adapters and the layers that they are for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardwise::error::ErrorKind;
use shardwise::models::{Model, lora_targets};
use shardwise::nn::Lora;
use shardwise::{Error, Result};

/// Settings of low-rank adapters: `rank=8,alpha=16,dropout=0.05,targets=q_proj+v_proj`, all of them optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct LoraSettings {
    pub(crate) lora: Lora,
    /// Ends of names of layers, or `all-linear`.
    targets: Vec<String>,
}

impl LoraSettings {
    /// Puts the adapters next to their layers and freezes everything else. All ranks must call it.
    pub(crate) fn apply(&self, model: &dyn Model) -> Result<()> {
        let targets = lora_targets(model, &self.targets)?;
        self.lora.apply(model, |path| targets.contains(path)).map(drop)
    }
}

impl FromStr for LoraSettings {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |found: String| {
            let needed = "rank=N,alpha=X,dropout=P,targets=NAME+NAME, or some of them";
            ErrorKind::Argument.error::<Error>(
                "--lora",
                found,
                needed,
                "for example --lora rank=8,targets=q_proj+v_proj",
            )
        };
        let (mut rank, mut alpha, mut dropout) = (Lora::default().rank, None, 0.0);
        let mut targets = vec!["all-linear".to_string()];
        for setting in text.split(',').filter(|setting| !setting.is_empty()) {
            let (name, value) = setting.split_once('=').ok_or_else(|| bad(format!("{setting:?}")))?;
            let number = || value.parse::<f64>().map_err(|_| bad(format!("{setting:?}")));
            match name {
                "rank" | "r" => rank = value.parse().map_err(|_| bad(format!("{setting:?}")))?,
                "alpha" => alpha = Some(number()?),
                "dropout" => dropout = number()?,
                "targets" => targets = value.split('+').map(str::to_string).collect(),
                _ => return Err(bad(format!("{setting:?}"))),
            }
        }
        // Twice the rank is what most recipes use.
        Ok(LoraSettings { lora: Lora { rank, alpha: alpha.unwrap_or(2.0 * rank as f64), dropout }, targets })
    }
}

impl fmt::Display for LoraSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lora { rank, alpha, dropout } = self.lora;
        write!(f, "rank={rank},alpha={alpha},dropout={dropout},targets={}", self.targets.join("+"))
    }
}

impl TryFrom<String> for LoraSettings {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<LoraSettings> for String {
    fn from(settings: LoraSettings) -> String {
        settings.to_string()
    }
}

#[test]
fn settings_come_back_from_their_text() {
    let parsed: LoraSettings = "rank=4,targets=q_proj+v_proj".parse().unwrap();
    assert_eq!((parsed.lora.rank, parsed.lora.alpha, parsed.lora.dropout), (4, 8.0, 0.0));
    assert_eq!(parsed.to_string(), "rank=4,alpha=8,dropout=0,targets=q_proj+v_proj");
    assert_eq!(parsed.to_string().parse::<LoraSettings>().unwrap(), parsed);
    assert_eq!("".parse::<LoraSettings>().unwrap().targets, ["all-linear"]);
    for wrong in ["rank", "rank=x", "size=3", "alpha="] {
        assert!(wrong.parse::<LoraSettings>().unwrap_err().to_string().contains(wrong), "{wrong}");
    }
}
