//! `shardwise show`: meshes, layouts and redistributions as pictures.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::redistribute::{Explanation, RedistributePlan, explain};
use shardwise::{DryWorld, TensorBox};

/// The options of `shardwise show`.
#[derive(Args)]
#[command(after_help = "\
Placements, one per mesh axis: R is replicated, S(d) sharded on dimension d, S(d;a,b,...) sharded with these sizes, SS(d,f) \
strided, BC(d,b) block-cyclic, P(sum) a partial sum. In a box, `0,1` are ranks with equal replicas and `0 + 1` ranks with \
terms of a partial value. Colours are by rank; they are left out in a pipe and if NO_COLOR is set.

Examples:
  shardwise show --mesh dp=2,tp=4
  shardwise show 8x64 'S(0),S(1)' --mesh dp=2,tp=2
  shardwise show 8x64 'S(0),S(0)' --mesh dp=2,tp=2 --order 0=tp,dp
  shardwise show 8x64 'P(sum),R' --mesh dp=2,tp=2 --to 'S(0),S(1)'
  shardwise show 4x128x512 'S(0),S(2)' --mesh dp=2,tp=4 --rows 0 --cols 2
  shardwise show 8x64 'S(0)' --mesh dp=4 --svg layout.svg")]
pub(crate) struct ShowOptions {
    /// Shape of the tensor, as in 8x64; without it the mesh is drawn
    shape: Option<String>,
    /// Placements of the tensor, one per mesh axis, as in 'S(0),R' [default: replicated]
    placements: Option<String>,
    /// Mesh of ranks
    #[arg(long, default_value = "dp=2,tp=2")]
    mesh: String,
    /// Placements to redistribute to: draws before, the steps with their bytes, after, and the rejected plans
    #[arg(long, value_name = "PLACEMENTS")]
    to: Option<String>,
    /// Order in which mesh axes shard a dimension, as in 0=tp,dp; may be repeated
    #[arg(long, value_name = "DIM=AXES")]
    order: Vec<String>,
    /// Dimension that is drawn as rows, with --cols [default: the first sharded one]
    #[arg(long, value_name = "DIM", requires = "cols")]
    rows: Option<usize>,
    /// Dimension that is drawn as columns, with --rows
    #[arg(long, value_name = "DIM", requires = "rows")]
    cols: Option<usize>,
    /// Element type, from which bytes are computed [default: f32]
    #[arg(long, default_value = "f32", hide_default_value = true, value_parser = ["u8", "i64", "f16", "bf16", "f32", "f64"])]
    dtype: String,
    /// Columns of text
    #[arg(long, default_value_t = 80, value_name = "COLUMNS")]
    width: usize,
    /// When to use colours [default: auto]
    #[arg(long, value_enum, default_value = "auto", hide_default_value = true)]
    color: ColorChoice,
    /// Write an SVG document to this file instead of text
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// Print JSON instead of a picture
    #[arg(long)]
    json: bool,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// A layout in JSON.
#[derive(Serialize)]
struct LayoutRow {
    layout: Layout,
    text: String,
    dtype: String,
    ranks: Vec<RankRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    redistribution: Option<RedistributionRow>,
}

/// What one rank holds.
#[derive(Serialize)]
struct RankRow {
    rank: usize,
    coordinate: Option<Vec<usize>>,
    local_shape: Vec<usize>,
    bytes: usize,
    boxes: Vec<TensorBox>,
}

/// A redistribution in JSON.
#[derive(Serialize)]
struct RedistributionRow {
    to: Layout,
    chosen: PlanRow,
    rejected: Vec<PlanRow>,
}

/// A plan in JSON.
#[derive(Serialize)]
struct PlanRow {
    bytes: usize,
    us: f64,
    steps: Vec<String>,
}

pub(crate) fn run(options: &ShowOptions) -> Result<()> {
    let mesh: Mesh = options.mesh.parse()?;
    let Some(shape) = &options.shape else {
        if options.to.is_some() || options.rows.is_some() || !options.order.is_empty() {
            let fix = "write for example `shardwise show 8x64 'S(0),R' --to 'R,R'`";
            return Err(ErrorKind::Argument.error("show", "an option for a tensor, without a shape", "a shape", fix));
        }
        let picture = mesh.picture();
        if options.json {
            return print(&serde_json::to_string(&mesh).map_err(std::io::Error::from)?);
        }
        return options.write(|width, color| picture.to_text(width, color), || picture.to_svg());
    };
    let shape = parse_shape(shape)?;
    let dtype = dtype_of(&options.dtype);
    let from = options.layout(&mesh, &shape, options.placements.as_deref())?;
    let Some(to) = &options.to else {
        if options.json {
            return print_json(&from, dtype, None);
        }
        let mut picture = from.picture().dtype(dtype);
        if let (Some(rows), Some(cols)) = (options.rows, options.cols) {
            picture = picture.dims(rows, cols)?;
        }
        return options.write(|width, color| picture.to_text(width, color), || picture.to_svg());
    };
    let to = options.layout(&mesh, &shape, Some(to))?;
    let explanation = explanation(&mesh, &from, &to, dtype)?;
    if options.json {
        return print_json(&from, dtype, Some(&explanation));
    }
    let mut picture = explanation.picture(dtype);
    if let (Some(rows), Some(cols)) = (options.rows, options.cols) {
        picture = picture.dims(rows, cols)?;
    }
    options.write(|width, color| picture.to_text(width, color), || picture.to_svg())
}

impl ShowOptions {
    fn layout(&self, mesh: &Mesh, shape: &[usize], placements: Option<&str>) -> Result<Layout> {
        let Some(placements) = placements else { return Layout::replicated(mesh, shape) };
        let mut orders: Vec<(usize, Vec<&str>)> = Vec::new();
        for order in &self.order {
            let read = order.split_once('=').and_then(|(dim, axes)| Some((dim.trim().parse().ok()?, axes)));
            let Some((dim, axes)) = read else {
                let fix = "write for example `--order 0=tp,dp`";
                return Err(ErrorKind::Argument.error("--order", format!("`{order}`"), "DIM=AXIS,AXIS", fix));
            };
            let axes: Vec<&str> = axes.split(',').map(str::trim).collect();
            axes.iter().try_for_each(|axis| mesh.axis(axis).map(drop))?;
            orders.push((dim, axes));
        }
        let placements = Placement::parse_list(placements)?;
        // An order is for the layouts in which these axes shard the dimension: with --to, for one of them or both.
        let shards = |(dim, axes): &&(usize, Vec<&str>)| {
            axes.iter()
                .all(|name| mesh.axis(name).is_ok_and(|a| placements.get(a).is_some_and(|p| p.is_shard(Some(*dim)))))
        };
        let used: Vec<(usize, &[&str])> =
            orders.iter().filter(shards).map(|(dim, axes)| (*dim, axes.as_slice())).collect();
        if let (None, Some((dim, axes))) = (&self.to, orders.iter().find(|order| !shards(order))) {
            let (found, needed) = (axes.join(","), format!("axes that shard dimension {dim}"));
            return Err(ErrorKind::Argument.error("--order", found, needed, "correct the placements or the order"));
        }
        Layout::with_shard_order(mesh, shape, placements.clone(), &used)
    }

    fn write(&self, text: impl FnOnce(usize, bool) -> String, svg: impl FnOnce() -> String) -> Result<()> {
        if let Some(path) = &self.svg {
            std::fs::write(path, svg()).map_err(|error| {
                let found = format!("{}: {error}", path.display());
                ErrorKind::path(path).error::<Error>("--svg", found, "a file that can be written", "name another file")
            })?;
            return Ok(writeln!(std::io::stderr(), "wrote {}", path.display())?);
        }
        let color = match self.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => {
                std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        // Narrower pictures have no room for boxes with ranks.
        print(text(self.width.max(40), color).trim_end())
    }
}

/// The plans of a redistribution, by the links between thread ranks.
fn explanation(mesh: &Mesh, from: &Layout, to: &Layout, dtype: DType) -> Result<Explanation> {
    let ranks = mesh.ranks().iter().max().map_or(1, |rank| rank + 1);
    let run = DryWorld::new(ranks)?.as_rank(mesh.ranks()[0])?;
    Ok(run.run(|world| explain(&world.device_mesh(mesh.clone())?, from, to, dtype))?.value)
}

fn parse_shape(text: &str) -> Result<Vec<usize>> {
    // Also as PyTorch and NumPy print shapes: in brackets, and with a comma after the only size.
    let inner = text.trim().strip_prefix(['[', '(']).and_then(|rest| rest.strip_suffix([']', ')'])).map(str::trim);
    if text.trim() == "scalar" || inner == Some("") {
        return Ok(Vec::new());
    }
    let sizes = inner.map_or(text.trim(), |inner| inner.strip_suffix(',').unwrap_or(inner));
    let parse = |size: &str| {
        size.trim().parse().map_err(|_| {
            let found = match size.trim() {
                "" => format!("a size that is missing in `{text}`"),
                size => format!("`{size}` in `{text}`"),
            };
            let fix = "write for example `8x64`, or `scalar` for no dimension";
            ErrorKind::Argument.error("shape", found, "sizes separated by x", fix)
        })
    };
    sizes.split(['x', ',']).map(parse).collect()
}

fn dtype_of(name: &str) -> DType {
    match name {
        "u8" => DType::U8,
        "i64" => DType::I64,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "f64" => DType::F64,
        _ => DType::F32,
    }
}

fn print_json(layout: &Layout, dtype: DType, explanation: Option<&Explanation>) -> Result<()> {
    let rank_row = |&rank: &usize| {
        let local_shape = layout.local_shape(rank);
        RankRow {
            rank,
            coordinate: layout.mesh().coordinate(rank),
            bytes: local_shape.iter().product::<usize>() * dtype.size_in_bytes(),
            local_shape,
            boxes: layout.boxes_of(rank).into_iter().map(|owned| owned.global).collect(),
        }
    };
    let plan_row = |plan: &RedistributePlan| PlanRow {
        bytes: plan.bytes(),
        us: plan.us(),
        steps: plan.steps().iter().map(ToString::to_string).collect(),
    };
    let redistribution = explanation.map(|found| RedistributionRow {
        to: found.chosen.to().clone(),
        chosen: plan_row(&found.chosen),
        rejected: found.rejected.iter().map(plan_row).collect(),
    });
    let row = LayoutRow {
        layout: layout.clone(),
        text: layout.to_string(),
        dtype: dtype.as_str().to_string(),
        ranks: layout.mesh().ranks().iter().map(rank_row).collect(),
        redistribution,
    };
    print(&serde_json::to_string(&row).map_err(std::io::Error::from)?)
}

fn print(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{text}")?)
}
