//! Pictures of redistributions: before, the steps, after, and the plans that were rejected.

use std::fmt;

use candle_core::DType;

use super::grid::PictureGrid;
use super::layout_picture::LayoutPicture;
use super::quantity::{bytes_text, time_text};
use super::{svg, text};
use crate::redistribute::{Explanation, RedistributePlan, RedistributeStep};

/// Most rejected plans that are listed; there can be dozens, and the first ones are the cheapest.
const MAX_REJECTED: usize = 5;

/// A picture of a redistribution: the layouts before and after as boxes, between them the steps with their bytes, and the cheapest
/// rejected plans.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::{DryWorld, redistribute::explain};
///
/// let run = DryWorld::new(2)?.run(|world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let layout = |placement| Layout::new(&mesh, (8, 8), [placement]);
///     let explanation = explain(&mesh, &layout(Shard(0))?, &layout(Replicate)?, DType::F32)?;
///     Ok(explanation.picture(DType::F32).to_string())
/// })?;
/// assert!(run.value.contains("1. all_gather over tp along dim 0"), "{}", run.value);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RedistributionPicture {
    explanation: Explanation,
    before: LayoutPicture,
    after: LayoutPicture,
}

impl Explanation {
    /// Returns a picture of the redistribution of a tensor of this type. Local.
    pub fn picture(&self, dtype: DType) -> RedistributionPicture {
        RedistributionPicture {
            before: self.chosen.from().picture().dtype(dtype),
            after: self.chosen.to().picture().dtype(dtype),
            explanation: self.clone(),
        }
    }
}

impl RedistributionPicture {
    /// Draws dimension `rows` as rows and `columns` as columns; see [`LayoutPicture::dims`].
    ///
    /// # Errors
    /// Those of [`LayoutPicture::dims`].
    pub fn dims(self, rows: usize, columns: usize) -> crate::error::Result<Self> {
        let RedistributionPicture { explanation, before, after } = self;
        Ok(RedistributionPicture {
            explanation,
            before: before.dims(rows, columns)?,
            after: after.dims(rows, columns)?,
        })
    }

    /// Returns the picture as text of at most `width` columns, with ANSI colours by rank if `color` is set.
    pub fn to_text(&self, width: usize, color: bool) -> String {
        self.grids().iter().map(|grid| text::text(grid, width, color)).collect()
    }

    /// Returns the picture as an SVG document.
    pub fn to_svg(&self) -> String {
        let grids = self.grids();
        let title =
            format!("redistribution from {} to {}", self.explanation.chosen.from(), self.explanation.chosen.to());
        svg::svg(&title, &grids.iter().collect::<Vec<_>>())
    }

    fn grids(&self) -> Vec<PictureGrid> {
        let RedistributePlanText { summary, steps } = plan_text(&self.explanation.chosen);
        let mut after = self.after.grid();
        after.remarks.push(String::new());
        let rejected = &self.explanation.rejected;
        let sentences = rejected.iter().take(MAX_REJECTED).map(|plan| {
            let RedistributePlanText { summary, steps } = plan_text(plan);
            format!("rejected: {summary}: {}", steps.join("; "))
        });
        after.remarks.extend(sentences);
        let more = rejected.len().saturating_sub(MAX_REJECTED);
        after.remarks.extend((more > 0).then(|| format!("and {more} more rejected plans")));
        let numbered = steps.iter().enumerate().map(|(i, step)| format!("{}. {step}", i + 1));
        let heading = [vec![String::new(), summary], numbered.collect(), vec![String::new()]].concat();
        let between = PictureGrid { heading, rows: vec![], columns: vec![], cells: vec![], remarks: vec![] };
        vec![self.before.grid(), between, after]
    }
}

/// A plan in words.
struct RedistributePlanText {
    summary: String,
    steps: Vec<String>,
}

fn plan_text(plan: &RedistributePlan) -> RedistributePlanText {
    let step = |step: &RedistributeStep| {
        let text = step.to_string();
        // The cost of a step follows in units that are easier to read.
        let text = text.rsplit_once(" (").filter(|_| step.cost.us > 0.0).map_or(text.as_str(), |(text, _)| text);
        match step.cost.us > 0.0 {
            true => format!("{text}, {}, {}", bytes_text(step.cost.bytes), time_text(step.cost.us)),
            false => format!("{text}, local"),
        }
    };
    let summary = match plan.steps().len() {
        0 => "nothing to do".to_string(),
        n => format!("{n} step(s), {} per rank, {}", bytes_text(plan.bytes()), time_text(plan.us())),
    };
    RedistributePlanText { summary, steps: plan.steps().iter().map(step).collect() }
}

impl fmt::Display for RedistributionPicture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(80, false))
    }
}
