//! How the inner loop of a product reads blocks: 32 elements at a time, as signed bytes with scales and an offset.

use super::BlockType;
use super::vectors::{HALF, Vectors};

/// Elements that share a scale of the rows, and that are read at a time.
pub(super) const GROUP: usize = 2 * HALF;

/// A type of blocks whose products are computed without expanding them first.
///
/// # Safety
/// All methods require that the processor has the instructions of `V`; `block` has [`BYTES`](Self::BYTES) bytes.
pub(super) trait QuantizedBlock {
    const TYPE: BlockType;
    /// Elements and bytes of a block.
    const ELEMENTS: usize;
    const BYTES: usize;
    /// Whether both halves of a group have one scale.
    const ONE_SCALE: bool = true;
    /// Whether a group has an offset.
    const HAS_OFFSET: bool = false;
    /// The scales of all groups.
    type Scales;

    unsafe fn scales<V: Vectors>(block: &[u8]) -> Self::Scales;

    /// Element `i` of a group is `scale * byte[i] + offset`: the scale and the offset, which is arbitrary if the type has none;
    /// or the scales of both halves, if they differ.
    unsafe fn group_scales<V: Vectors>(scales: &Self::Scales, group: usize) -> V::Pair;

    /// The elements `32 * group..32 * (group + 1)` of a block as signed bytes.
    unsafe fn group<V: Vectors>(block: &[u8], group: usize) -> [V::Bytes; 2];
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Lower halves of 16 bytes, then the upper ones.
#[inline(always)]
unsafe fn nibbles<V: Vectors>(bytes: &[u8]) -> [V::Bytes; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = V::load(bytes);
        [V::field(bytes, 0, 15), V::field(bytes, 4, 15)]
    }
}

/// Nibbles at `at`, with the fifth bits of all 32 elements in the four bytes before.
#[inline(always)]
unsafe fn five_bits<V: Vectors>(block: &[u8], at: usize) -> [V::Bytes; 2] {
    let fifth = word(block, at - 4);
    // SAFETY: the caller's promise.
    unsafe {
        let [low, high] = nibbles::<V>(&block[at..]);
        [V::or(low, V::where_set(fifth as u16, 16)), V::or(high, V::where_set((fifth >> 16) as u16, 16))]
    }
}

#[inline(always)]
unsafe fn subtracted<V: Vectors>([first, second]: [V::Bytes; 2], from_each: u8) -> [V::Bytes; 2] {
    // SAFETY: the caller's promise.
    unsafe { [V::subtract(first, from_each), V::subtract(second, from_each)] }
}

/// Blocks of 32 elements that begin with a half float, the scale, and with another one if they have an offset.
macro_rules! blocks_of_one_group {
    ($($name:ident $bytes:literal $has_offset:literal, $V:ident, |$block:ident| $group:expr;)*) => {$(
        pub(super) struct $name;

        impl QuantizedBlock for $name {
            const TYPE: BlockType = BlockType::$name;
            const ELEMENTS: usize = GROUP;
            const BYTES: usize = $bytes;
            const HAS_OFFSET: bool = $has_offset;
            /// Two half floats.
            type Scales = u32;

            #[inline(always)]
            unsafe fn scales<V: Vectors>(block: &[u8]) -> u32 {
                word(block, 0)
            }

            #[inline(always)]
            unsafe fn group_scales<V: Vectors>(&halves: &u32, _: usize) -> V::Pair {
                // SAFETY: the caller's promise.
                unsafe { V::halves(halves) }
            }

            #[inline(always)]
            unsafe fn group<$V: Vectors>($block: &[u8], _: usize) -> [$V::Bytes; 2] {
                // SAFETY: the caller's promise.
                unsafe { $group }
            }
        }
    )*};
}

blocks_of_one_group! {
    Q8_0 34 false, V, |block| [V::load(&block[2..]), V::load(&block[2 + HALF..])];
    Q4_0 18 false, V, |block| subtracted::<V>(nibbles::<V>(&block[2..]), 8);
    Q4_1 20 true, V, |block| nibbles::<V>(&block[4..]);
    Q5_0 22 false, V, |block| subtracted::<V>(five_bits::<V>(block, 6), 16);
    Q5_1 24 true, V, |block| five_bits::<V>(block, 8);
}

pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

/// Scales and offsets of the groups of Q4_K and Q5_K: 6 bits each, of which the last four groups have their upper two bits in
/// other bytes than the lower four.
#[inline(always)]
unsafe fn scales_and_offsets<V: Vectors>(block: &[u8]) -> [[f32; 2]; 8] {
    let packed = [word(block, 4), word(block, 8), word(block, 12)];
    let last_scales = packed[2] & 0x0f0f_0f0f | (packed[0] >> 6 & 0x0303_0303) << 4;
    let last_minima = packed[2] >> 4 & 0x0f0f_0f0f | (packed[1] >> 6 & 0x0303_0303) << 4;
    let scales = (u64::from(last_scales) << 32 | u64::from(packed[0] & 0x3f3f_3f3f)).to_le_bytes();
    let minima = (u64::from(last_minima) << 32 | u64::from(packed[1] & 0x3f3f_3f3f)).to_le_bytes();
    // SAFETY: the caller's promise.
    let [scale, minimum] = unsafe { V::values(V::halves(word(block, 0))) };
    std::array::from_fn(|group| [scale * f32::from(scales[group]), -(minimum * f32::from(minima[group]))])
}

impl QuantizedBlock for Q4K {
    const TYPE: BlockType = BlockType::Q4K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const HAS_OFFSET: bool = true;
    type Scales = [[f32; 2]; 8];

    #[inline(always)]
    unsafe fn scales<V: Vectors>(block: &[u8]) -> [[f32; 2]; 8] {
        // SAFETY: the caller's promise.
        unsafe { scales_and_offsets::<V>(block) }
    }

    #[inline(always)]
    unsafe fn group_scales<V: Vectors>(scales: &[[f32; 2]; 8], group: usize) -> V::Pair {
        // SAFETY: the caller's promise.
        unsafe { V::pair(scales[group]) }
    }

    #[inline(always)]
    unsafe fn group<V: Vectors>(block: &[u8], group: usize) -> [V::Bytes; 2] {
        // Two groups share 32 bytes: the lower halves of the bytes are the first group.
        let (bytes, shift) = (&block[16 + group / 2 * GROUP..], group % 2 * 4);
        // SAFETY: the caller's promise.
        unsafe { [V::field(V::load(bytes), shift, 15), V::field(V::load(&bytes[HALF..]), shift, 15)] }
    }
}

impl QuantizedBlock for Q5K {
    const TYPE: BlockType = BlockType::Q5K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const HAS_OFFSET: bool = true;
    type Scales = [[f32; 2]; 8];

    #[inline(always)]
    unsafe fn scales<V: Vectors>(block: &[u8]) -> [[f32; 2]; 8] {
        // SAFETY: the caller's promise.
        unsafe { scales_and_offsets::<V>(block) }
    }

    #[inline(always)]
    unsafe fn group_scales<V: Vectors>(scales: &[[f32; 2]; 8], group: usize) -> V::Pair {
        // SAFETY: the caller's promise.
        unsafe { V::pair(scales[group]) }
    }

    #[inline(always)]
    unsafe fn group<V: Vectors>(block: &[u8], group: usize) -> [V::Bytes; 2] {
        let (bytes, fifth, shift) = (&block[48 + group / 2 * GROUP..], &block[16..48], group % 2 * 4);
        // SAFETY: the caller's promise.
        unsafe {
            let first = V::shift_left(V::field(V::load(fifth), group, 1), 4);
            let second = V::shift_left(V::field(V::load(&fifth[HALF..]), group, 1), 4);
            [
                V::or(V::field(V::load(bytes), shift, 15), first),
                V::or(V::field(V::load(&bytes[HALF..]), shift, 15), second),
            ]
        }
    }
}

impl QuantizedBlock for Q6K {
    const TYPE: BlockType = BlockType::Q6K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const ONE_SCALE: bool = false;
    /// The scale of the block, and those of its 16 groups of 16 elements.
    type Scales = (f32, [u8; 16]);

    #[inline(always)]
    unsafe fn scales<V: Vectors>(block: &[u8]) -> (f32, [u8; 16]) {
        let mut of_groups = [0; 16];
        of_groups.copy_from_slice(&block[192..208]);
        // SAFETY: the caller's promise.
        let [scale, _] = unsafe { V::values(V::halves(u32::from(u16::from_le_bytes([block[208], block[209]])))) };
        (scale, of_groups)
    }

    #[inline(always)]
    unsafe fn group_scales<V: Vectors>(&(scale, of_groups): &(f32, [u8; 16]), group: usize) -> V::Pair {
        let (first, second) = (of_groups[2 * group].cast_signed(), of_groups[2 * group + 1].cast_signed());
        // SAFETY: the caller's promise.
        unsafe { V::pair([scale * f32::from(first), scale * f32::from(second)]) }
    }

    #[inline(always)]
    unsafe fn group<V: Vectors>(block: &[u8], group: usize) -> [V::Bytes; 2] {
        // Each half of a block has 128 elements: 64 bytes with four lower bits of two elements each, 32 with two upper bits.
        let (part, quarter) = (group / 4, group % 4);
        let low = &block[part * 64 + quarter % 2 * GROUP..];
        let high = &block[128 + part * GROUP..];
        let (low_shift, high_shift) = (quarter / 2 * 4, quarter * 2);
        // SAFETY: the caller's promise.
        unsafe {
            let first = V::shift_left(V::field(V::load(high), high_shift, 3), 4);
            let second = V::shift_left(V::field(V::load(&high[HALF..]), high_shift, 3), 4);
            let first = V::or(V::field(V::load(low), low_shift, 15), first);
            let second = V::or(V::field(V::load(&low[HALF..]), low_shift, 15), second);
            subtracted::<V>([first, second], 32)
        }
    }
}
