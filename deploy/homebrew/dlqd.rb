# This formula was not run: no release is published yet. VERSION and the four checksums come from SHA256SUMS of a
# release (docs/versions.md); the formula then belongs into a tap of its own.
class Dlqd < Formula
  desc "Dead-letter office for Postgres, with River beside it"
  homepage "https://github.com/dlqd/dlqd"
  version "VERSION"
  license "MIT"

  on_macos do
    on_arm do
      url "https://github.com/dlqd/dlqd/releases/download/v#{version}/dlqd_#{version}_darwin_arm64.tar.gz"
      sha256 "SHA256_OF_DARWIN_ARM64"
    end
    on_intel do
      url "https://github.com/dlqd/dlqd/releases/download/v#{version}/dlqd_#{version}_darwin_amd64.tar.gz"
      sha256 "SHA256_OF_DARWIN_AMD64"
    end
  end
  on_linux do
    on_arm do
      url "https://github.com/dlqd/dlqd/releases/download/v#{version}/dlqd_#{version}_linux_arm64.tar.gz"
      sha256 "SHA256_OF_LINUX_ARM64"
    end
    on_intel do
      url "https://github.com/dlqd/dlqd/releases/download/v#{version}/dlqd_#{version}_linux_amd64.tar.gz"
      sha256 "SHA256_OF_LINUX_AMD64"
    end
  end

  def install
    bin.install "dlqd"
    man1.install Dir["man/*.1.gz"]
    generate_completions_from_executable(bin/"dlqd", "completion")
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/dlqd version")
  end
end
