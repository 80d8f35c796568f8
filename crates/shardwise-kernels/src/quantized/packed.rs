//! How the inner loop of a product reads blocks: 32 elements at a time, as integers with a scale and an offset.

use super::BlockType;

/// Elements of a register that sums are kept in: the same on every instruction set, for the same bits.
pub(super) const LANES: usize = 16;
/// Elements that are read at a time.
pub(super) const GROUP: usize = 2 * LANES;

/// 32 elements of a block: element `i` is `scale * integers[i] + offset`, with a scale for each half.
pub(super) struct Group {
    pub(super) integers: [[f32; LANES]; 2],
    pub(super) scales: [f32; 2],
    pub(super) offset: f32,
}

/// A type of blocks whose products are computed without expanding them first.
pub(super) trait QuantizedBlock {
    const TYPE: BlockType;
    /// Elements and bytes of a block.
    const ELEMENTS: usize;
    const BYTES: usize;
    /// Whether both halves of a group have one scale.
    const ONE_SCALE: bool = true;

    /// The elements `32 * group..32 * (group + 1)` of a block.
    fn group(block: &[u8], group: usize) -> Group;
}

/// A half float. Not the `half` crate's conversion, which asks for the instructions of the processor at every call.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    let bits = u16::from_le_bytes([block[at], block[at + 1]]);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 2^112 moves the exponent of a half float to that of an f32; subnormal ones become normal by the product.
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let value = if bits & 0x7c00 == 0x7c00 { f32::from_bits(magnitude | 0x7f80_0000) } else { finite };
    f32::from_bits(value.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// 16 bytes as elements, each through `read`.
#[inline(always)]
fn lanes(bytes: &[u8], read: impl Fn(u8, usize) -> i32) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    let bytes = &bytes[..LANES];
    for i in 0..LANES {
        lanes[i] = read(bytes[i], i) as f32;
    }
    lanes
}

#[inline(always)]
fn uniform(integers: [[f32; LANES]; 2], scale: f32, offset: f32) -> Group {
    Group { integers, scales: [scale; 2], offset }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl QuantizedBlock for Q8_0 {
    const TYPE: BlockType = BlockType::Q8_0;
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let signed = |at: usize| lanes(&block[at..], |byte, _| i32::from(byte.cast_signed()));
        uniform([signed(2), signed(2 + LANES)], half(block, 0), 0.0)
    }
}

impl QuantizedBlock for Q4_0 {
    const TYPE: BlockType = BlockType::Q4_0;
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let (low, high) =
            (lanes(&block[2..], |byte, _| i32::from(byte & 15)), lanes(&block[2..], |byte, _| i32::from(byte >> 4)));
        let scale = half(block, 0);
        uniform([low, high], scale, -8.0 * scale)
    }
}

impl QuantizedBlock for Q4_1 {
    const TYPE: BlockType = BlockType::Q4_1;
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let (low, high) =
            (lanes(&block[4..], |byte, _| i32::from(byte & 15)), lanes(&block[4..], |byte, _| i32::from(byte >> 4)));
        uniform([low, high], half(block, 0), half(block, 2))
    }
}

/// Nibbles at `at`, with the fifth bits of all 32 elements in the four bytes before.
#[inline(always)]
fn five_bits(block: &[u8], at: usize) -> [[f32; LANES]; 2] {
    let bits = u32::from_le_bytes([block[at - 4], block[at - 3], block[at - 2], block[at - 1]]);
    let fifth = |i: usize| ((bits >> i) & 1).cast_signed() << 4;
    [
        lanes(&block[at..], |byte, i| i32::from(byte & 15) | fifth(i)),
        lanes(&block[at..], |byte, i| i32::from(byte >> 4) | fifth(LANES + i)),
    ]
}

impl QuantizedBlock for Q5_0 {
    const TYPE: BlockType = BlockType::Q5_0;
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let scale = half(block, 0);
        uniform(five_bits(block, 6), scale, -16.0 * scale)
    }
}

impl QuantizedBlock for Q5_1 {
    const TYPE: BlockType = BlockType::Q5_1;
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        uniform(five_bits(block, 8), half(block, 0), half(block, 2))
    }
}

/// Scale and minimum of a group of Q4_K and Q5_K: 6 bits each, of which the last four groups have their upper two bits in other bytes.
#[inline(always)]
fn scale_and_minimum(block: &[u8], group: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, minimum) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4),
    };
    (half(block, 0) * f32::from(scale), -(half(block, 2) * f32::from(minimum)))
}

impl QuantizedBlock for Q4K {
    const TYPE: BlockType = BlockType::Q4K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn group(block: &[u8], group: usize) -> Group {
        // Two groups share 32 bytes: the lower halves of the bytes are the first group.
        let (bytes, shift) = (&block[16 + group / 2 * GROUP..], group % 2 * 4);
        let read = |byte: u8, _: usize| i32::from(byte >> shift & 15);
        let (scale, offset) = scale_and_minimum(block, group);
        uniform([lanes(bytes, read), lanes(&bytes[LANES..], read)], scale, offset)
    }
}

impl QuantizedBlock for Q5K {
    const TYPE: BlockType = BlockType::Q5K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;

    #[inline(always)]
    fn group(block: &[u8], group: usize) -> Group {
        let (bytes, fifth, shift) = (&block[48 + group / 2 * GROUP..], &block[16..48], group % 2 * 4);
        let half_group = |first: usize| {
            let fifth = &fifth[first..first + LANES];
            lanes(&bytes[first..], |byte, i| i32::from(byte >> shift & 15) | i32::from(fifth[i] >> group & 1) << 4)
        };
        let (scale, offset) = scale_and_minimum(block, group);
        uniform([half_group(0), half_group(LANES)], scale, offset)
    }
}

impl QuantizedBlock for Q6K {
    const TYPE: BlockType = BlockType::Q6K;
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const ONE_SCALE: bool = false;

    #[inline(always)]
    fn group(block: &[u8], group: usize) -> Group {
        // Each half of a block has 128 elements: 64 bytes with four lower bits of two elements each, 32 with two upper bits.
        let (part, quarter) = (group / 4, group % 4);
        let low = &block[part * 64 + quarter % 2 * GROUP..];
        let high = &block[128 + part * GROUP..];
        let (low_shift, high_shift) = (quarter / 2 * 4, quarter * 2);
        let half_group = |first: usize| {
            let high = &high[first..first + LANES];
            let read =
                |byte: u8, i: usize| i32::from(byte >> low_shift & 15) | i32::from(high[i] >> high_shift & 3) << 4;
            lanes(&low[first..], |byte, i| read(byte, i) - 32)
        };
        let scale = |i: usize| half(block, 208) * f32::from(block[192 + group * 2 + i].cast_signed());
        Group { integers: [half_group(0), half_group(LANES)], scales: [scale(0), scale(1)], offset: 0.0 }
    }
}
