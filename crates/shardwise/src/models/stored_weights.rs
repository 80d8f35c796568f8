//! The weights of a model in the files of a checkpoint: where each parameter is, and reading a rank's part of it.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Tensor};

use super::load_options::LoadOptions;
use super::names::{WeightName, WeightNames};
use super::pretrained::PretrainedConfig;
use crate::checkpoint::{Catalog, MAPPED_BUFFER, MappedBox, RankLoad, read_mapped, read_mapped_blocks};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, OwnedBox, TensorBox, TensorMeta};
use crate::nn::{Module, ModuleItem};
use crate::ops::BlockType;
use crate::placement::Placement;

/// The tensors of a checkpoint that hold the parameters of a model.
pub(super) struct StoredWeights<'a> {
    catalog: &'a Catalog,
    /// Per path of a parameter the tensors with parts of it: name in the file, entry of the table, position of the path in it.
    parts: BTreeMap<&'a str, Vec<(String, &'a WeightName, usize)>>,
    shapes: &'a BTreeMap<String, Vec<usize>>,
    /// Parameters that stay quantized.
    quantized: BTreeMap<String, KeptBlocks>,
}

/// How a parameter stays quantized.
#[derive(Clone, Copy)]
struct KeptBlocks {
    block: BlockType,
    /// Rows that one rank holds together: in an expert, the inputs of one block of the down-projection.
    rows: usize,
}

impl<'a> StoredWeights<'a> {
    /// Finds all weights; an error names all tensors that are missing, unknown or of another shape.
    pub(super) fn find(
        catalog: &'a Catalog,
        config: &PretrainedConfig,
        names: &'a WeightNames,
        shapes: &'a BTreeMap<String, Vec<usize>>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let family = config.family();
        let mut parts: BTreeMap<&str, Vec<(String, &WeightName, usize)>> = BTreeMap::new();
        let (mut missing, mut wrong, mut used) = (Vec::new(), Vec::new(), BTreeSet::new());
        for weight in &names.0 {
            let with = format!("{}{}", family.prefix, weight.name);
            let without = weight.name.strip_prefix(family.prefix);
            let spellings = [Some(weight.name.as_str()), without, Some(with.as_str())];
            let spellings = spellings.into_iter().flatten().flat_map(|name| [name.to_string(), older_name(name)]);
            let Some(key) = spellings.into_iter().find(|name| catalog.tensors.contains_key(name)) else {
                missing.push(weight.name.clone());
                continue;
            };
            let key = key.as_str();
            used.insert(key.to_string());
            let needed = weight.stored_shape(&shapes_at(weight, shapes));
            let found = &catalog.tensors[key].shape;
            if *found != needed {
                wrong.push((key.to_string(), found.clone(), needed));
            }
            for (part, path) in weight.paths.iter().enumerate() {
                parts.entry(path).or_default().push((key.to_string(), weight, part));
            }
        }
        let known = |name: &str| {
            let bare = name.strip_prefix(family.prefix).unwrap_or(name);
            let mut ignored = family.ignored_tensors.iter().copied();
            // A tied head may be stored; the embedding is used.
            used.contains(name)
                || ignored.any(|pattern| matches_text(pattern, name) || matches_text(pattern, bare))
                || options.ignored_tensors.iter().any(|ignored| ignored == name)
                || shapes.get("head.weight").is_none() && matches!(bare, "lm_head.weight" | "embed_out.weight")
        };
        let unexpected: Vec<String> = catalog.tensors.keys().filter(|name| !known(name)).cloned().collect();
        if let Some((name, found, needed)) = wrong.first() {
            let more = if wrong.len() > 1 { format!(", and {} more", wrong.len() - 1) } else { String::new() };
            return Err(ErrorKind::shape(found).error(
                "weights",
                format!("tensor {name:?} of shape {found:?}{more}"),
                format!("{needed:?}, as config.json says"),
                "use the config.json that belongs to these weights",
            ));
        }
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(StoredWeights { catalog, parts, shapes, quantized: BTreeMap::new() });
        }
        let found = format!(
            "{} missing tensor(s){}, {} unknown tensor(s){}",
            missing.len(),
            listed(&missing),
            unexpected.len(),
            listed(&unexpected)
        );
        let needed = format!("the tensors of a model of kind {}, as config.json says", family.model_type);
        // A model of which tensors are missing cannot be helped; ones that nobody needs can be left out.
        let fix = match missing.is_empty() {
            false => "use the config.json that belongs to these weights",
            true => {
                "use the config.json that belongs to these weights, or leave the unknown ones out: with `shardwise ckpt convert \
                 --exclude`, or `LoadOptions::ignored_tensors` in a program"
            }
        };
        Err(ErrorKind::State { missing, unexpected }.error("weights", found, needed, fix))
    }

    /// The boxes of files that a rank needs for its local part of a parameter.
    fn boxes(&self, path: &str, owned: &OwnedBox) -> Vec<MappedBox> {
        let mut boxes = Vec::new();
        for (key, weight, part) in self.parts.get(path).into_iter().flatten() {
            let shapes = shapes_at(weight, self.shapes);
            for found in weight.boxes_of(*part, &shapes, &owned.global) {
                let from_start = found.offsets.iter().zip(&owned.global.offsets).map(|(a, b)| a - b);
                let offsets = from_start.zip(&owned.local_offsets).map(|(inside, local)| inside + local).collect();
                boxes.push(MappedBox {
                    key: key.clone(),
                    stored: found.stored,
                    transposed: weight.transposed && found.sizes.len() == 2,
                    offsets,
                    sizes: found.sizes,
                });
            }
        }
        boxes
    }

    /// Keeps the weights of linear layers, embeddings and experts quantized that are; those of experts if all three stacks are.
    pub(super) fn keep_quantized(mut self, module: &dyn Module) -> Self {
        let mut found = BTreeMap::new();
        module.walk("", &mut |path, item| match item {
            ModuleItem::Module("Linear" | "Embedding") => {
                let weight = format!("{path}.weight");
                found.extend(self.quantization(&weight).map(|block| (weight, KeptBlocks { block, rows: 1 })));
            }
            ModuleItem::Module("Experts") => {
                let stacks = ["gate", "up", "down"].map(|name| format!("{path}.{name}"));
                let blocks: Option<Vec<BlockType>> = stacks.iter().map(|path| self.quantization(path)).collect();
                if let Some([gate, up, down]) = blocks.as_deref() {
                    let rows = [down.elements(), down.elements(), 1];
                    let kept = [gate, up, down].into_iter().zip(rows);
                    found.extend(stacks.into_iter().zip(kept.map(|(&block, rows)| KeptBlocks { block, rows })));
                }
            }
            _ => {}
        });
        self.quantized = found;
        self
    }

    /// The blocks of a matrix or a stack of matrices, all of whose parts have blocks of one type.
    fn quantization(&self, path: &str) -> Option<BlockType> {
        let (parts, columns) = (self.parts.get(path)?, self.shapes[path].last()?);
        let of_part = |(key, weight, _): &(String, &WeightName, usize)| {
            let block = self.catalog.tensors[key].quantization()?;
            (!weight.transposed && columns.is_multiple_of(block.elements())).then_some(block)
        };
        let first = of_part(parts.first()?)?;
        parts.iter().all(|part| of_part(part) == Some(first)).then_some(first)
    }

    /// The type of the blocks of a parameter that stays quantized.
    pub(super) fn block_type(&self, path: &str) -> Option<BlockType> {
        self.quantized.get(path).map(|kept| kept.block)
    }

    /// The layout of a parameter in memory, where the plan says `layout`: that of its blocks if it stays quantized.
    pub(super) fn layout_in_memory(&self, path: &str, layout: &Layout) -> Result<Layout> {
        let layout = layout.reduced();
        match self.quantized.get(path) {
            Some(kept) => in_blocks(&in_whole_rows(&layout, kept.rows)?, kept.block),
            None => Ok(layout),
        }
    }

    /// The boxes of files that a rank needs for a parameter with this layout in memory.
    fn boxes_of(&self, path: &str, held: &Layout, rank: usize) -> Vec<MappedBox> {
        let block = self.block_type(path).map(BlockType::elements);
        let in_elements = |owned: OwnedBox| match block {
            None => owned,
            Some(block) => {
                let matrix = |sizes: &[usize]| {
                    let [leading @ .., blocks, _] = sizes else { unreachable!("blocks have bytes") };
                    [leading, &[blocks * block]].concat()
                };
                let global = TensorBox { offsets: matrix(&owned.global.offsets), sizes: matrix(&owned.global.sizes) };
                OwnedBox { global, local_offsets: matrix(&owned.local_offsets), ..owned }
            }
        };
        held.boxes_of(rank).into_iter().flat_map(|owned| self.boxes(path, &in_elements(owned))).collect()
    }

    /// Reads this rank's part of a parameter with this layout in memory, in `dtype` unless it stays quantized; also returns
    /// how many bytes of files that took.
    pub(super) fn read(&self, path: &str, held: &Layout, rank: usize, dtype: DType) -> Result<(Tensor, u64)> {
        let boxes = self.boxes_of(path, held, rank);
        let block = self.block_type(path);
        let meta = TensorMeta { shape: held.local_shape(rank), dtype: block.map_or(dtype, |_| DType::U8) };
        let local = match block {
            Some(block) => read_mapped_blocks(self.catalog, block, meta, &boxes)?,
            None => read_mapped(self.catalog, meta, &boxes)?,
        };
        Ok((local, self.bytes(&boxes) as u64))
    }

    fn bytes(&self, boxes: &[MappedBox]) -> usize {
        boxes.iter().map(|mapped| self.catalog.tensors[&mapped.key].box_bytes(&mapped.stored) as usize).sum()
    }

    /// What a rank would read and hold with these layouts.
    pub(super) fn rank_load(&self, rank: usize, layouts: &BTreeMap<String, Layout>, dtype: DType) -> Result<RankLoad> {
        let mut load = RankLoad { rank, tensor_bytes: 0, read_bytes: 0, peak_bytes: 0, chunks: 0, files: 0 };
        let mut files = BTreeSet::new();
        for (path, layout) in layouts {
            let held = self.layout_in_memory(path, layout)?;
            let size = if self.quantized.contains_key(path) { 1 } else { dtype.size_in_bytes() };
            load.tensor_bytes += held.local_shape(rank).iter().product::<usize>() * size;
            let boxes = self.boxes_of(path, &held, rank);
            load.read_bytes += self.bytes(&boxes);
            for mapped in boxes {
                for chunk in &self.catalog.tensors[&mapped.key].chunks {
                    if chunk.part.intersect(&mapped.stored).is_some() {
                        load.chunks += 1;
                        files.insert(chunk.file.as_str());
                    }
                }
            }
        }
        load.files = files.len();
        load.peak_bytes = load.tensor_bytes + MAPPED_BUFFER;
        Ok(load)
    }
}

/// The layout of the blocks of matrices: `[.., rows, blocks, bytes of a block]`. Columns that are sharded between blocks stay
/// where they are; otherwise blocks are divided evenly.
fn in_blocks(layout: &Layout, block: BlockType) -> Result<Layout> {
    let (columns, leading) = layout.shape().split_last().expect("quantized weights are matrices");
    let dim = leading.len();
    let placements = layout.placements().iter().enumerate().map(|(axis, placement)| {
        if placement.shard_dim() != Some(dim) {
            return placement.clone();
        }
        match parts_of(layout, axis, dim, block.elements()) {
            Some(sizes) => Placement::ragged(dim as isize, sizes),
            None => Placement::Shard(dim as isize),
        }
    });
    let placements = placements.collect::<Vec<_>>();
    let shape = [leading, &[columns / block.elements(), block.bytes()]].concat();
    let mut orders = layout.shard_orders();
    orders.push(Vec::new());
    Layout::from_shard_orders(layout.mesh(), &shape, &placements, &orders)
}

/// The layout of matrices of which rows are sharded only in groups of `group`.
fn in_whole_rows(layout: &Layout, group: usize) -> Result<Layout> {
    let Some(dim) = layout.shape().len().checked_sub(2).filter(|_| group > 1) else { return Ok(layout.clone()) };
    let placements = layout.placements().iter().enumerate().map(|(axis, placement)| {
        let sizes = placement.shard_dim().filter(|at| *at == dim).and_then(|_| parts_of(layout, axis, dim, group));
        let in_rows = |sizes: Vec<usize>| sizes.iter().map(|size| size * group).collect::<Vec<_>>();
        sizes.map_or(placement.clone(), |sizes| Placement::ragged(dim as isize, in_rows(sizes)))
    });
    let placements = placements.collect::<Vec<_>>();
    Layout::from_shard_orders(layout.mesh(), layout.shape(), &placements, &layout.shard_orders())
}

/// The parts of a dimension that the coordinates of an axis hold, in groups of `group` elements: those of the layout if they are
/// whole groups, otherwise groups divided evenly. `None` if several axes shard the dimension, or not in order.
fn parts_of(layout: &Layout, axis: usize, dim: usize, group: usize) -> Option<Vec<usize>> {
    if layout.shard_order(dim).len() != 1 || !layout.placements()[axis].is_contiguous() {
        return None;
    }
    let mesh = layout.mesh();
    let count = mesh.shape()[axis];
    let sizes = (0..count).map(|i| {
        let mut coordinates = vec![0; mesh.ndim()];
        coordinates[axis] = i;
        mesh.rank_at(&coordinates).map(|rank| layout.local_shape(rank)[dim])
    });
    let whole = sizes.map(|size| size.filter(|size| size.is_multiple_of(group)).map(|size| size / group));
    let groups = layout.shape()[dim] / group;
    let step = groups.div_ceil(count);
    let evenly = || (0..count).map(|i| groups.saturating_sub(i * step).min(step)).collect();
    Some(whole.collect::<Option<Vec<usize>>>().unwrap_or_else(evenly))
}

/// The name of a norm in files that come from TensorFlow, as the first BERT models do.
fn older_name(name: &str) -> String {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
}

/// The shapes of the parameters of an entry of the table.
fn shapes_at(weight: &WeightName, shapes: &BTreeMap<String, Vec<usize>>) -> Vec<Vec<usize>> {
    weight.paths.iter().map(|path| shapes[path].clone()).collect()
}

/// The first few of some names, for messages.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 6;
    if names.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    format!(" ({}{})", shown.join(", "), if names.len() > SHOWN { ", ..." } else { "" })
}

/// Whether a text matches a pattern in which `*` stands for any text.
fn matches_text(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).filter(|&i| text.is_char_boundary(i)).any(|i| matches_text(rest, &text[i..]))
        }),
    }
}
