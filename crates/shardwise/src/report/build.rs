//! Builds a report from a profile, and joins those of all ranks.

use std::collections::HashMap;

use super::lanes::{LaneKind, lanes, total};
use super::layouts::{layout_report, layout_text, redistribution_report};
use super::memory_series::memory_series;
use super::simulated_times::simulate;
use super::spans::SpanRow;
use super::traffic::{axes_of, axes_text, matrix, traffic};
use super::{AxisReport, ModuleReport, ParameterReport, RankReport, RunReport};
use crate::comm::{DeviceMesh, Profile, ProfileSpan, World, gather_texts};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::nn::{Module, ModuleItem};
use crate::plan::DEFAULT_FLOPS_PER_S;
use crate::tensor::DTensor;

/// Texts by number.
#[derive(Default)]
struct Strings {
    texts: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Strings {
    fn number(&mut self, text: String) -> u32 {
        *self.numbers.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            self.texts.len() as u32 - 1
        })
    }
}

impl RunReport {
    /// Builds the report of this rank's profile. Local; [`gather`](Self::gather) joins the reports of all ranks.
    ///
    /// `module` is the model whose modules and parameters are shown. The times of a dry run are estimated, by the links of the mesh and
    /// 20e9 operations per second; see [`with_flops_per_s`](Self::with_flops_per_s).
    ///
    /// # Errors
    /// [`Error::Invalid`] if the profile has layouts that cannot be planned.
    pub fn new(title: &str, mesh: &DeviceMesh, module: &dyn Module, profile: &Profile) -> Result<RunReport> {
        Self::with_flops_per_s(title, mesh, module, profile, DEFAULT_FLOPS_PER_S)
    }

    /// As [`new`](Self::new); the times of a dry run are estimated with this number of operations per second.
    pub fn with_flops_per_s(
        title: &str,
        mesh: &DeviceMesh,
        module: &dyn Module,
        profile: &Profile,
        flops_per_s: f64,
    ) -> Result<RunReport> {
        let mut profile = profile.clone();
        if profile.is_dry {
            simulate(&mut profile, mesh, flops_per_s);
        }
        let axis = |axis: &crate::mesh::Axis| {
            let link = mesh.link(&axis.name)?;
            let (latency_us, gb_per_s) = (link.latency_us, link.gb_per_s);
            Ok(AxisReport { name: axis.name.to_string(), size: axis.size, latency_us, gb_per_s })
        };
        let mut report = RunReport {
            title: title.to_string(),
            is_dry: profile.is_dry,
            axes: mesh.mesh().axes().iter().map(axis).collect::<Result<_>>()?,
            size: mesh.mesh().size(),
            modules: Vec::new(),
            parameters: Vec::new(),
            layouts: Default::default(),
            redistributions: Default::default(),
            ranks: Vec::new(),
            matrix: matrix(&profile, mesh.mesh()),
        };
        report.add_module(mesh, module);
        let rank = report.rank(mesh, &profile)?;
        report.ranks.push(rank);
        Ok(report)
    }

    /// Joins the reports of all ranks; rank 0 gets the result, other ranks `None`. Collective.
    ///
    /// # Errors
    /// Those of a collective.
    #[track_caller]
    pub fn gather(self, world: &World) -> Result<Option<RunReport>> {
        let mine = serde_json::to_string(&self).map_err(Error::other)?;
        let texts = gather_texts(world, &mine, std::panic::Location::caller())?;
        if world.rank() != 0 {
            return Ok(None);
        }
        let mut all = self;
        for text in &texts[1..] {
            let other: RunReport = serde_json::from_str(text).map_err(Error::other)?;
            all.layouts.extend(other.layouts);
            all.redistributions.extend(other.redistributions);
            all.ranks.extend(other.ranks);
            all.matrix.extend(other.matrix);
        }
        Ok(Some(all))
    }

    fn add_module(&mut self, mesh: &DeviceMesh, module: &dyn Module) {
        let mut parameters = Vec::new();
        module.walk("", &mut |path, item| match item {
            ModuleItem::Module(kind) => {
                self.modules.push(ModuleReport { path: path.to_string(), kind: kind.to_string() });
            }
            ModuleItem::Param(param) => parameters.push((path.to_string(), param.get(), false)),
            ModuleItem::Buffer(buffer) => parameters.push((path.to_string(), buffer.get(), true)),
            _ => {}
        });
        for (path, value, is_buffer) in parameters {
            let (layout, dtype) = (self.add_layout(mesh, value.layout()), value.dtype().as_str().to_string());
            self.parameters.push(ParameterReport { path, dtype, layout, local_bytes: local_bytes(&value), is_buffer });
        }
    }

    /// The key of a layout.
    fn add_layout(&mut self, mesh: &DeviceMesh, layout: &Layout) -> String {
        let text = layout_text(layout, mesh.mesh());
        if !self.layouts.contains_key(&text) {
            self.layouts.insert(text.clone(), layout_report(layout));
        }
        text
    }

    fn rank(&mut self, mesh: &DeviceMesh, profile: &Profile) -> Result<RankReport> {
        let mut strings = Strings::default();
        // Groups of a large mesh have many ranks, and few groups make all collectives.
        let mut axes_by_group: HashMap<Vec<usize>, String> = HashMap::new();
        let mut axes_of_group = |group: &[usize]| {
            if let Some(found) = axes_by_group.get(group) {
                return found.clone();
            }
            let found = axes_text(mesh.mesh(), &axes_of(mesh.mesh(), group));
            axes_by_group.insert(group.to_vec(), found.clone());
            found
        };
        #[allow(clippy::mutable_key_type)] // a layout is one allocation, compared by its address
        let mut keys: HashMap<Layout, u32> = HashMap::new();
        let mut spans = Vec::with_capacity(profile.spans.len());
        for span in &profile.spans {
            let axes = (!span.group.is_empty()).then(|| strings.number(span_axes(span, &mut axes_of_group)));
            let mut numbers = |report: &mut RunReport, strings: &mut Strings, layouts: &[Layout]| -> Vec<u32> {
                let number = |layout: &Layout| match keys.get(layout) {
                    Some(&number) => number,
                    None => {
                        let number = strings.number(report.add_layout(mesh, layout));
                        keys.insert(layout.clone(), number);
                        number
                    }
                };
                layouts.iter().map(number).collect()
            };
            let (inputs, outputs) =
                (numbers(self, &mut strings, &span.inputs), numbers(self, &mut strings, &span.outputs));
            let redistribution = self.add_redistribution(mesh, span, &inputs, &outputs, &mut strings)?;
            spans.push(SpanRow {
                kind: span.kind,
                name: strings.number(span.name.to_string()),
                parent: span.parent.map(|parent| parent as u32),
                start: span.start.as_nanos() as u64,
                duration: span.duration.as_nanos() as u64,
                waiting: span.waiting.as_nanos() as u64,
                module: span.module.as_ref().map(|module| strings.number(module.to_string())),
                phase: span.phase,
                inputs,
                outputs,
                axes,
                bytes: span.bytes as u64,
                flops: span.flops,
                site: span.site.map(|site| strings.number(format!("{}:{}", site.file(), site.line()))),
                reason: span.reason.as_ref().map(|reason| strings.number(reason.to_string())),
                redistribution,
            });
        }
        let lanes = lanes(&profile.spans);
        let (memory, peak) = memory_series(profile);
        Ok(RankReport {
            rank: profile.rank,
            duration: profile.duration.as_nanos() as u64,
            compute: total(&lanes, LaneKind::Compute),
            moving: total(&lanes, LaneKind::Moving),
            waiting: total(&lanes, LaneKind::Waiting),
            traffic: traffic(profile, |span| span_axes(span, &mut axes_of_group)),
            strings: strings.texts,
            spans,
            lanes,
            memory,
            peak,
        })
    }

    /// The number of the text of a redistribution, if the span is one.
    fn add_redistribution(
        &mut self,
        mesh: &DeviceMesh,
        span: &ProfileSpan,
        inputs: &[u32],
        outputs: &[u32],
        strings: &mut Strings,
    ) -> Result<Option<u32>> {
        let (Some(dtype), [from], [to]) = (span.dtype, &span.inputs[..], &span.outputs[..]) else { return Ok(None) };
        if from.mesh() != mesh.mesh() || to.mesh() != mesh.mesh() {
            return Ok(None);
        }
        let text = |number: &u32| strings.texts[*number as usize].as_str();
        let key = format!("{} {} to {}", dtype.as_str(), text(&inputs[0]), text(&outputs[0]));
        if !self.redistributions.contains_key(&key) {
            self.redistributions.insert(key.clone(), redistribution_report(mesh, from, to, dtype)?);
        }
        Ok(Some(strings.number(key)))
    }
}

/// The mesh axes of a collective: those of its group if that was created for axes, else found by `of_group`.
fn span_axes(span: &ProfileSpan, of_group: &mut dyn FnMut(&[usize]) -> String) -> String {
    span.axes.as_deref().map_or_else(|| of_group(&span.group), String::from)
}

/// Bytes of the local part of a tensor.
fn local_bytes(value: &DTensor) -> usize {
    value.layout().local_shape(value.device_mesh().world().rank()).iter().product::<usize>()
        * value.dtype().size_in_bytes()
}
