# A formula for a tap. It installs from wheels, which a tap may do and homebrew-core may not:
# - MLX has no source distribution on PyPI. homebrew-core builds its own `mlx` from GitHub, in a version of its choice.
# - tokenizers, safetensors, hf-xet, pydantic-core and llguidance would need Rust, and a quarter of an hour.
# So pip needs the network during the installation, and takes the newest versions that pyproject.toml allows.
#
# A release has this file with the checksum of its source distribution. Here the checksum is a placeholder.
class Mlxpaged < Formula
  desc "LLM server for Apple Silicon: paged attention and continuous batching"
  homepage "https://pypi.org/project/mlxpaged/"
  url "https://files.pythonhosted.org/packages/source/m/mlxpaged/mlxpaged-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma # MLX's wheels are for macOS 14 and newer
  depends_on "python@3.13"

  # The headers of libraries in wheels have no room for the long names that Homebrew would write into them.
  preserve_rpath

  def install
    system formula_opt_bin("python@3.13")/"python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--only-binary=:all:", buildpath
    bin.install_symlink libexec/"bin/mlxpaged"
    generate_completions_from_executable(bin/"mlxpaged", "completion")
  end

  # The same as `mlxpaged service install`: a server that ends with status 0, as after `mlxpaged stop`, stays ended.
  service do
    run [opt_bin/"mlxpaged", "serve"]
    keep_alive successful_exit: false
    throttle_interval 30
    process_type :interactive
    environment_variables PATH: std_service_path_env
    working_dir var
    log_path var/"log/mlxpaged.log"
    error_log_path var/"log/mlxpaged.log"
  end

  def caveats
    <<~EOS
      `brew services start mlxpaged` serves the bundled demo model until you name another one in
      ~/.config/mlxpaged/config.toml:
        model = "qwen3:4b"
    EOS
  end

  test do
    port = free_port
    pid = spawn bin/"mlxpaged", "serve", "demo", "--port", port.to_s
    begin
      health = shell_output("curl --silent --fail --retry 60 --retry-delay 1 --retry-all-errors " \
                            "http://127.0.0.1:#{port}/health")
      assert_equal "ok", JSON.parse(health)["status"]
    ensure
      Process.kill "TERM", pid
      Process.wait pid
    end
  end
end
